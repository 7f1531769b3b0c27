//! Memory for supervised training.

use anyhow::Result;
use candle_grpo_core::validate::at_least_one;
use candle_grpo_kernels::cuda_is_enabled;
use candle_grpo_nn::DecoderConfig;

use super::SftConfig;
use crate::learn::MemoryPlan;
use crate::learn::memory_plan::{Division, Learning, examples};

impl MemoryPlan {
    /// Computes the memory for supervised training of `model` on rows up to `longest` tokens long,
    /// on one of `world_size` ranks.
    ///
    /// # Errors
    ///
    /// If `config` or its adapters are invalid, or there are no ranks.
    pub fn supervised(
        model: &DecoderConfig,
        config: &SftConfig,
        longest: usize,
        world_size: usize,
    ) -> Result<Self> {
        at_least_one("world_size", world_size)?;
        config.validate()?;
        let sizes = (config.micro_batch_tokens, config.batch_size);
        let learning = Learning {
            adapters: config.adapters.as_ref(),
            base_weights: config.base_weights,
            compute_dtype: config.compute_dtype,
            activation_checkpointing: config.activation_checkpointing,
            activation_offloading: config.activation_offloading,
            optimizer: &config.optimizer,
            passes: &examples(sizes, longest),
            distillation: None,
            on_cuda: cuda_is_enabled(),
            division: Division::new(config.sharding, world_size),
        };
        learning.plan(model)
    }
}
