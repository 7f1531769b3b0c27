//! Inputs to a policy loss other than log-probs.

use candle_core::{DType, Result, Tensor};
use candle_grpo_loss::StepTotals;

use crate::noise::noise;

pub(super) struct Step {
    /// `[B, T]`
    pub(super) targets: Tensor,
    /// `[B, T]`, all ones.
    pub(super) mask: Tensor,
    /// `[B]`
    pub(super) advantages: Tensor,
    pub(super) totals: StepTotals,
}

impl Step {
    /// Creates the inputs for `targets` `[B, T]`.
    pub(super) fn new(targets: &Tensor) -> Result<Self> {
        let mask = targets.ones_like()?;
        Ok(Self {
            advantages: noise(targets.dim(0)?, 1.0, 4, DType::F32, targets.device())?,
            totals: StepTotals::count(&mask)?,
            mask,
            targets: targets.clone(),
        })
    }
}
