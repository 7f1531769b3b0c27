//! The search for the NaN or infinity of a loss.

use anyhow::Result;
use candle_core::{D, DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_nn::{Gradients, all_finite};

use crate::{NotFinite, TrainingBatch};

/// [`Gradients::clip_factor`] of the gradients of all ranks, for which it waits. `owner` is a
/// prefix for error messages.
///
/// # Errors
///
/// [`NotFinite`] with the name of the first gradient that is not finite.
pub(crate) fn clip_factor(
    gradients: &mut Gradients,
    max_norm: f64,
    owner: &str,
) -> Result<(f64, f64)> {
    gradients.finish_reduction()?;
    match gradients.clip_factor(max_norm) {
        Ok(norm_and_factor) => Ok(norm_and_factor),
        Err(error) => match gradients.not_finite() {
            Ok(Some(name)) => Err(NotFinite::new(format!("{owner}gradient of {name}")).into()),
            _ => Err(error.into()),
        },
    }
}

/// The reason that the policy loss of `batch` is not finite: the first of its inputs that is not,
/// or the loss itself.
pub(crate) fn blame(batch: &TrainingBatch) -> Result<NotFinite> {
    let mask = Mask::new(batch.tokens().response_mask())?;
    for (name, tensor) in batch.policy().tensors() {
        if tensor.dtype().is_float() && !is_finite(tensor, &mask)? {
            return Ok(NotFinite::new(name));
        }
    }
    Ok(NotFinite::new("policy loss"))
}

/// The reason that the divergence from the teacher of `batch` is not finite, as [`blame`].
pub(crate) fn blame_teacher(batch: &TrainingBatch) -> Result<NotFinite> {
    let mask = Mask::new(batch.tokens().response_mask())?;
    let of_teacher = batch.teacher.iter().flat_map(|x| x.by_sequence());
    for (name, tensor) in of_teacher {
        let sums = tensor.to_dtype(DType::F32)?.sum(D::Minus1)?;
        if !is_finite(&sums, &mask)? {
            return Ok(NotFinite::new(name));
        }
    }
    Ok(NotFinite::new("distillation loss"))
}

/// Returns true if all selected entries of `[B]`, `[B, 1]` or `[B, T]` are finite.
fn is_finite(tensor: &Tensor, mask: &Mask) -> Result<bool> {
    let columns = match tensor.rank() {
        1 => tensor.unsqueeze(1)?,
        _ => tensor.clone(),
    };
    let tensor = columns.broadcast_as(mask.selected().shape())?;
    Ok(all_finite(&mask.select(&tensor.contiguous()?)?)?)
}
