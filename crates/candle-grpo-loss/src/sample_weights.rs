//! Weights of samples, by length and by difficulty.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_core::Mask;

/// Weights `[B]` that favour short responses, as in ROLL: `1.5 - (n - min n) / (max n - min n)` with n the number of
/// tokens, scaled to the mean 1. Give the mask `[B, T]` of the whole step.
pub fn length_weights(response_mask: &Tensor) -> Result<Tensor> {
    let lengths = Mask::new(response_mask)?.lengths(DType::F32)?.squeeze(1)?;
    let (min, max) = (lengths.min_keepdim(0)?, lengths.max_keepdim(0)?);
    let range = (max - &min)?.maximum(1.)?;
    let share = lengths.broadcast_sub(&min)?.broadcast_div(&range)?;
    mean_one(&(share.neg()? + 1.5)?)
}

/// Weights `[B]` that favour hard prompts, as in ROLL: `0.5 + 1.5 * difficulty`, with the difficulty `[B]` of each sample
/// clamped to 0 and 1, scaled to the mean 1. Give the difficulties of the whole step.
pub fn difficulty_weights(difficulty: &Tensor) -> Result<Tensor> {
    if difficulty.rank() != 1 || difficulty.elem_count() == 0 {
        bail!("difficulty: shape {:?}, must be [B]", difficulty.dims());
    }
    let difficulty = difficulty.detach().to_dtype(DType::F32)?.clamp(0., 1.)?;
    mean_one(&((difficulty * 1.5)? + 0.5)?)
}

fn mean_one(weights: &Tensor) -> Result<Tensor> {
    weights.broadcast_div(&weights.mean_keepdim(0)?)
}
