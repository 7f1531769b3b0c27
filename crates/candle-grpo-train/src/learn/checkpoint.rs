//! Trainer checkpoints.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_nn::{ComputeDType, ModelConfig};

use super::Trainer;
use crate::Pretrained;

impl<C: ModelConfig> Trainer<C> {
    /// Writes a custom model's checkpoint into an existing directory, such as the one that
    /// [`Checkpoints::write`](crate::run::Checkpoints::write) creates: the current weights as
    /// `model.safetensors`, the configuration as `config.json`, the tokenizer as `tokenizer.json`,
    /// and [`Self::save_state`].
    ///
    /// # Errors
    ///
    /// Fails if the model is a decoder, which needs `write_checkpoint`. Fails with
    /// [`NotFinite`](crate::NotFinite), before anything is written, if a weight is NaN or infinite.
    pub fn write_custom_checkpoint(&self, folder: &Path) -> Result<()> {
        self.models.write_custom(folder, self.tokenizer())?;
        self.save_state(folder)
    }

    /// Takes part when rank 0 writes a checkpoint or calls [`Self::save_state`]. If the ranks
    /// divide anything ([`TrainConfig::sharding`](crate::TrainConfig::sharding)), all others
    /// must call it meanwhile.
    pub fn take_part_in_checkpoint(&self) -> Result<()> {
        self.models.take_part_in_save()
    }

    /// Writes the run's state except the policy weights, which [`Pretrained::write_files`] writes
    /// into the same directory: the trainer and optimizer states, adapters in `adapter/`, the
    /// critic, and a reference that follows the policy.
    ///
    /// Custom advantage estimators, reward functions and generators must save their state
    /// themselves.
    pub fn save_state(&self, folder: &Path) -> Result<()> {
        self.ensure_whole()?;
        self.models.save(folder, &self.state, self.prompts())
    }

    /// Resumes from a checkpoint that `write_checkpoint` or `write_custom_checkpoint` wrote. On the
    /// CPU, the following steps are bit-identical to those in an uninterrupted run. The trainer
    /// must have the same model and configuration as the one that wrote the checkpoint.
    ///
    /// # Errors
    ///
    /// Fails if the shape, adapters, critic, or a custom model's configuration differs, or the
    /// initial weights under adapters or for the reference do. Do not use the trainer after an
    /// error.
    pub fn load_state(&mut self, folder: &Path) -> Result<()> {
        let prompts = Arc::clone(&self.collector.prompts);
        self.state = self.models.load(folder, &self.state, &prompts)?;
        let unfinished = self.state.unfinished_groups.len();
        if unfinished > 0 && !self.config.rollout.partial {
            tracing::warn!("rollout.partial: false, so {unfinished} unfinished groups are lost");
            self.state.unfinished_groups.clear();
        }
        self.torn = false;
        self.last = None;
        self.discard_collected();
        Ok(())
    }
}

impl Trainer {
    /// Writes a checkpoint into an existing directory: `model` with the policy's current weights,
    /// as [`Pretrained::save`] writes it and in `dtype`, and [`Self::save_state`]. Adapters are
    /// merged into the weights. Another dtype than f32 is for readers: if all weights train, they
    /// are also written in f32, from which the run resumes.
    ///
    /// # Errors
    ///
    /// Fails with [`NotFinite`](crate::NotFinite), before anything is written, if a weight is NaN
    /// or infinite.
    pub fn write_checkpoint(
        &self,
        folder: &Path,
        model: &Pretrained,
        dtype: ComputeDType,
    ) -> Result<()> {
        self.models.write_policy(folder, model, dtype)?;
        self.save_state(folder)
    }
}
