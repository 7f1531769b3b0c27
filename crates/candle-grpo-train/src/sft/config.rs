//! Supervised training settings.

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::Collective;
use candle_grpo_core::schedule::Decay;
use candle_grpo_core::validate as check;
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{
    ActivationCheckpointing, AdamWConfig, BaseWeights, ComputeDType, LoraConfig, WeightDivision,
};
use serde::{Deserialize, Serialize};

use crate::ActorConfig;
use crate::learn::LearningRateSchedule;
use crate::learn::actor::{
    division, ensure_dense, ensure_dtypes, ensure_memory, ensure_offloading, stored_form,
};
use candle_grpo_base::within;

/// Supervised training settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// Number of rows per optimizer step. The loss is the mean over all their tokens that train.
    pub batch_size: usize,
    /// Number of tokens per backward pass, into which rows are packed without padding. Rows do not
    /// attend to each other. This bounds memory and does not change the update. A longer row gets
    /// its own pass.
    pub micro_batch_tokens: usize,
    /// Maximum global gradient norm.
    pub max_grad_norm: f64,
    /// Low-rank adapters; if present, only they train. Absent: all parameters train.
    pub adapters: Option<LoraConfig>,
    /// In-memory format for the linear maps under adapters: `dense` in the compute dtype, or in
    /// quantized blocks (QLoRA, <https://arxiv.org/abs/2305.14314>). For blocks, choose a GGUF
    /// file's own (`stored`), or `q4_0`, `q5_0`, `q8_0`, `q4_k`, `q5_k` or `q6_k`.
    pub base_weights: BaseWeights,
    /// Keep only a layer's input for the backward pass, and recompute the rest: `true` for all
    /// layers, `false` for none, or the number of layers. The update has the same bits. With all,
    /// memory hardly grows with the number of layers, and a step takes a third longer. With fewer,
    /// it takes less time and more memory.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Move the kept inputs of these layers from the GPU to page-locked main memory until the
    /// backward pass. The copies run beside the computation, and the update has the same bits. For
    /// long sequences. On the CPU, it changes nothing.
    pub activation_offloading: bool,
    /// Compute dtype. Weights that train are stored in f32 as well; weights under adapters only in
    /// this dtype.
    pub compute_dtype: ComputeDType,
    /// Coefficient for the load-balancing loss in a model with experts (Switch Transformer,
    /// <https://arxiv.org/abs/2101.03961>; `router_aux_loss_coef` in transformers). A pass is
    /// weighted by its share of the tokens.
    pub router_aux_loss_coef: f64,
    /// The tensors that ranks in a data-parallel run divide: `none`, `optimizer` (the optimizer
    /// state; ZeRO, stage 1, <https://arxiv.org/abs/1910.02054>), `resident` (the state, the gradients, and
    /// in half precision the f32 weights), or `full` (also all other weights, which the ranks
    /// gather block by block). Checkpoints do not depend on it.
    pub sharding: Sharding,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The learning-rate schedule.
    pub schedule: SftSchedule,
    /// Number of passes over the rows; may be a fraction.
    pub epochs: f64,
    /// Number of optimizer steps, in place of `epochs`.
    pub max_steps: Option<usize>,
    /// Seed for the row order and the adapters.
    pub seed: u64,
}

/// Learning rate over a supervised run: a linear warm-up, then a decay until the last step, with
/// the formulas in [`LearningRateSchedule`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SftSchedule {
    /// Number of steps until the optimizer's learning rate is reached.
    pub warmup_steps: usize,
    /// Decay curve until the last step: `cosine` or `linear`. Null: the learning rate is constant
    /// after the warm-up.
    pub decay: Option<Decay>,
    /// Minimum learning rate in the decay, as a fraction of the optimizer's: from 0 to 1.
    pub min_lr_ratio: f64,
}

impl Default for SftSchedule {
    fn default() -> Self {
        Self {
            warmup_steps: 0,
            decay: Some(Decay::Cosine),
            min_lr_ratio: 0.,
        }
    }
}

impl SftSchedule {
    /// Returns the schedule for a run with `steps` steps.
    ///
    /// # Errors
    ///
    /// Fails if the warm-up is longer than the run, the minimum is not between 0 and 1, or there is
    /// a minimum without a decay.
    pub fn of_steps(&self, steps: usize) -> Result<LearningRateSchedule> {
        check::check(
            self.warmup_steps <= steps,
            "warmup_steps",
            self.warmup_steps,
            &format!("be at most {steps}, the steps of the run"),
        )?;
        let schedule = LearningRateSchedule {
            warmup_steps: self.warmup_steps,
            decay_until: self.decay.map(|_| steps),
            decay: self.decay.unwrap_or_default(),
            min_lr_ratio: self.min_lr_ratio,
        };
        check::unit_interval("min_lr_ratio", self.min_lr_ratio)?;
        check::check(
            self.decay.is_some() || self.min_lr_ratio == 0.,
            "min_lr_ratio",
            self.min_lr_ratio,
            "be 0 without a decay",
        )?;
        Ok(schedule)
    }
}

impl Default for SftConfig {
    fn default() -> Self {
        Self {
            batch_size: 32,
            micro_batch_tokens: 4096,
            max_grad_norm: 1.,
            adapters: None,
            base_weights: BaseWeights::default(),
            activation_checkpointing: ActivationCheckpointing::default(),
            activation_offloading: false,
            compute_dtype: ComputeDType::F32,
            router_aux_loss_coef: 0.,
            sharding: Sharding::None,
            optimizer: AdamWConfig {
                learning_rate: 2e-5,
                ..AdamWConfig::default()
            },
            schedule: SftSchedule::default(),
            epochs: 1.,
            max_steps: None,
            seed: 0,
        }
    }
}

impl SftConfig {
    /// Checks everything that depends neither on the model nor on the rows.
    ///
    /// # Errors
    ///
    /// Contains an [`Invalid`](candle_grpo_core::Invalid) that names the field.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("batch_size", self.batch_size),
            ("micro_batch_tokens", self.micro_batch_tokens),
            ("max_steps", self.max_steps.unwrap_or(1)),
        ] {
            check::at_least_one(name, value)?;
        }
        check::positive("max_grad_norm", self.max_grad_norm)?;
        check::positive("epochs", self.epochs)?;
        check::non_negative("router_aux_loss_coef", self.router_aux_loss_coef)?;
        check::check(
            self.base_weights == BaseWeights::Dense || self.adapters.is_some(),
            "base_weights",
            "quantized",
            "be dense unless adapters train",
        )?;
        self.optimizer
            .validate()
            .map_err(|error| within("optimizer", error.into()))?;
        ensure_dtypes(&self.optimizer, self.compute_dtype, self.adapters.is_some())?;
        ensure_memory(&self.optimizer, self.adapters.is_some(), self.sharding)?;
        ensure_dense(self.sharding, self.base_weights)?;
        ensure_offloading(self.activation_checkpointing, self.activation_offloading)?;
        // The length of the run is checked with the rows.
        self.schedule
            .of_steps(self.max_steps.unwrap_or(usize::MAX))
            .map(drop)
            .map_err(|error| within("schedule", error))
    }

    /// Returns how many rows a run over `rows` rows visits, and how many steps it has.
    pub fn length(&self, rows: usize) -> (usize, usize) {
        match self.max_steps {
            Some(steps) => (steps.saturating_mul(self.batch_size), steps),
            None => {
                let visits = (self.epochs * rows as f64).ceil().max(1.) as usize;
                (visits, visits.div_ceil(self.batch_size))
            }
        }
    }

    /// Returns the storage format for the model's linear maps, and the dtype for its other weights:
    /// the compute dtype under adapters, otherwise the master weights' dtype.
    pub fn stored_form(&self) -> (BaseWeights, ComputeDType) {
        let has_adapters = self.adapters.is_some();
        stored_form(
            self.base_weights,
            self.compute_dtype,
            has_adapters,
            &self.optimizer,
        )
    }

    /// Returns the division of the policy's weights between the ranks in `collective`, for
    /// [`Pretrained::load_divided`](crate::Pretrained::load_divided). `None` if these settings do
    /// not divide them.
    pub fn division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision> {
        let ranks = (collective, self.sharding);
        let has_adapters = self.adapters.is_some();
        division(&self.optimizer, self.compute_dtype, has_adapters, ranks)
    }

    /// Policy settings. The policy loss is not used.
    pub(super) fn actor(&self) -> ActorConfig {
        ActorConfig {
            policy_loss: PolicyLoss::default(),
            optimizer: self.optimizer.clone(),
            temperature: 1.,
            activation_checkpointing: self.activation_checkpointing,
            activation_offloading: self.activation_offloading,
            compute_dtype: self.compute_dtype,
            router_aux_loss_coef: self.router_aux_loss_coef,
            distillation_loss: None,
        }
    }
}
