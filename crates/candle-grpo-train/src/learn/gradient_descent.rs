//! A model's gradients, and its optimizer's steps.

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::Collective;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{AdamW, AdamWConfig, ComputeCopies, Gradients, Parameters};

use super::StepStats;
use crate::NotFinite;

/// A model's accumulated gradients, and the optimizer that applies them.
pub(crate) struct GradientDescent {
    pub(super) gradients: Gradients,
    pub(super) optimizer: AdamW,
}

impl GradientDescent {
    /// Creates an optimizer without gradients, of the part that this rank has.
    pub(super) fn new(
        config: AdamWConfig,
        trained: &Parameters,
        (collective, sharding): (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        Ok(Self {
            gradients: Gradients::with_dtype(config.gradient_dtype),
            optimizer: AdamW::sharded(config, trained, collective, sharding)?,
        })
    }

    /// Sums the gradients over all ranks while the next backward pass runs, see
    /// [`AdamW::begin_reduction`].
    pub(super) fn begin_reduction(&mut self, collective: &Arc<dyn Collective>) -> Result<()> {
        Ok(self
            .optimizer
            .begin_reduction(&mut self.gradients, collective)?)
    }

    /// Lets gradients be summed in turn with the operations of backward passes, see
    /// [`Gradients::reduce_in_turn`].
    pub(super) fn reduce_in_turn(&mut self, in_turn: bool) {
        self.gradients.reduce_in_turn(in_turn);
    }

    /// Returns whether every backward pass sums the gradients, and not only the last one of an
    /// optimizer step.
    pub(super) fn reduces_each_pass(&self) -> bool {
        matches!(
            self.optimizer.sharding(),
            Sharding::Resident | Sharding::Full
        )
    }

    /// Clips all ranks' gradients to the norm `max_norm`, makes an optimizer step and clears the
    /// gradients, also after an error. `owner` is a prefix for error messages.
    ///
    /// # Errors
    ///
    /// Fails if there are no gradients, and with [`NotFinite`], which names the first gradient that
    /// is not finite. The parameters are then unchanged.
    pub(super) fn step(
        &mut self,
        trained: &Parameters,
        copies: &ComputeCopies,
        max_norm: f64,
        owner: &str,
    ) -> Result<StepStats> {
        let learning_rate = self.optimizer.learning_rate();
        let result = self.clip_factor(max_norm, owner);
        let result = result.and_then(|(grad_norm, factor)| {
            self.optimizer
                .scaled_step(trained, &self.gradients, factor, copies)?;
            Ok(StepStats {
                grad_norm,
                learning_rate,
            })
        });
        self.gradients.clear();
        result
    }

    fn clip_factor(&mut self, max_norm: f64, owner: &str) -> Result<(f64, f64)> {
        self.gradients.finish_reduction()?;
        match self.gradients.clip_factor(max_norm) {
            Ok(norm_and_factor) => Ok(norm_and_factor),
            Err(error) => match self.gradients.not_finite() {
                Ok(Some(name)) => Err(NotFinite::new(format!("{owner}gradient of {name}")).into()),
                _ => Err(error.into()),
            },
        }
    }
}
