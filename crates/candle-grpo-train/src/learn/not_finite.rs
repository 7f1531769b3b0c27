//! Numbers that are none.

use std::error::Error;
use std::fmt;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_nn::Gradients;

use crate::TrainingBatch;

/// The error of a step that would learn from a NaN or an infinity. Nothing has changed by it.
///
/// It is found by its type, whatever has been said around it: `error.is::<NotFinite>()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFinite {
    what: String,
}

impl NotFinite {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }

    /// The tensor.
    pub fn tensor(&self) -> &str {
        &self.what
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: not finite, nothing was learned from it", self.what)
    }
}

impl Error for NotFinite {}

/// Scales `gradients` down to `max_norm`, and returns their norm before. Errs with the name of the first that is not finite;
/// `owner` says whose they are.
pub(crate) fn clip(gradients: &mut Gradients, max_norm: f64, owner: &str) -> Result<f64> {
    match gradients.clip_by_global_norm(max_norm) {
        Ok(norm) => Ok(norm),
        Err(error) => match gradients.not_finite() {
            Ok(Some(name)) => Err(NotFinite::new(format!("{owner}gradient of {name}")).into()),
            _ => Err(error.into()),
        },
    }
}

/// Why the policy loss of `batch` is not finite: the first of what it was computed from that is not, or the loss itself.
pub(crate) fn blame(batch: &TrainingBatch) -> Result<NotFinite> {
    let mask = Mask::new(&batch.tokens.response_mask)?;
    let inputs = [
        ("advantages", Some(&batch.advantages)),
        ("old_log_probs", batch.old_log_probs.as_ref()),
        ("ref_log_probs", batch.ref_log_probs.as_ref()),
        ("rollout_log_probs", batch.rollout_log_probs.as_ref()),
        ("importance_weights", batch.importance_weights.as_ref()),
    ];
    for (name, tensor) in inputs {
        if let Some(tensor) = tensor
            && !is_finite(tensor, &mask)?
        {
            return Ok(NotFinite::new(name));
        }
    }
    Ok(NotFinite::new("policy loss"))
}

/// Whether all entries of `[B]` or `[B, T]` that count are finite.
fn is_finite(tensor: &Tensor, mask: &Mask) -> Result<bool> {
    let tensor = match tensor.rank() {
        1 => tensor.unsqueeze(1)?.broadcast_as(mask.selected().shape())?,
        _ => tensor.clone(),
    };
    // Zero times a number is zero, unless the number is not finite.
    let sum = (mask.select(&tensor.contiguous()?)? * 0.)?.sum_all()?;
    Ok(sum.to_dtype(DType::F32)?.to_scalar::<f32>()? == 0.)
}
