//! Checkpoints of a trainer.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_nn::{ComputeDType, ModelConfig};

use super::Trainer;
use crate::Pretrained;

impl<C: ModelConfig> Trainer<C> {
    /// Writes a checkpoint of a custom model into an existing folder, such as that of
    /// [`Checkpoints::write`](crate::run::Checkpoints::write): the current weights as
    /// `model.safetensors`, the configuration as `config.json`, the tokenizer as `tokenizer.json`,
    /// and [`Self::save_state`].
    ///
    /// # Errors
    ///
    /// If the model is a decoder, whose checkpoint is that of `write_checkpoint`, and
    /// [`NotFinite`](crate::NotFinite) before anything is written, if a weight is NaN or infinite.
    pub fn write_custom_checkpoint(&self, folder: &Path) -> Result<()> {
        self.models.write_custom(folder, self.tokenizer())?;
        self.save_state(folder)
    }

    /// Takes part in a checkpoint or [`Self::save_state`] of rank 0. With
    /// [`TrainConfig::sharded_optimizer`](crate::TrainConfig::sharded_optimizer) all other ranks
    /// must call it meanwhile.
    pub fn take_part_in_checkpoint(&self) -> Result<()> {
        self.models.take_part_in_save()
    }

    /// Writes the state of the run except the weights of the policy, which
    /// [`Pretrained::write_files`] writes into the same folder: the state of trainer and
    /// optimizers, adapters in `adapter/`, the critic, and a reference that follows the policy.
    ///
    /// Custom advantage estimators, reward functions and generators must save their state
    /// themselves.
    pub fn save_state(&self, folder: &Path) -> Result<()> {
        self.ensure_whole()?;
        self.models.save(folder, &self.state, self.prompts())
    }

    /// Resumes from a checkpoint of `write_checkpoint`, or of a custom model. On the CPU the
    /// following steps are bit-identical to those of an uninterrupted run. The trainer must have
    /// the same model and configuration as the one that wrote the checkpoint.
    ///
    /// # Errors
    ///
    /// If shape, adapters, critic or the initial weights of adapters or reference differ, or the
    /// configuration of a custom model. The
    /// trainer must not be used after an error.
    pub fn load_state(&mut self, folder: &Path) -> Result<()> {
        let prompts = Arc::clone(&self.collector.prompts);
        self.state = self.models.load(folder, &self.state, &prompts)?;
        self.torn = false;
        self.last = None;
        self.discard_collected();
        Ok(())
    }
}

impl Trainer {
    /// Writes a checkpoint into an existing folder: `model` with the current weights of the policy,
    /// in the form of [`Pretrained::save`] and in `dtype`, and [`Self::save_state`]. Adapters are
    /// merged into the weights. Another dtype than f32 is for readers: if all weights train, they
    /// are also written in f32, from which the run resumes.
    ///
    /// # Errors
    ///
    /// [`NotFinite`](crate::NotFinite) before anything is written, if a weight is NaN or infinite.
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
