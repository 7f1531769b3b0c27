//! The search for the NaN or infinity of a loss.

use anyhow::Result;
use candle_core::{D, DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_nn::all_finite;

use crate::{NotFinite, Sequence, TrainingBatch};

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
    for (teacher, found) in &batch.teachers {
        let counts = |sequence: &Sequence| sequence.teacher() == Some(teacher);
        let mask = mask.and(&batch.tokens().mask_of(counts)?)?;
        for (name, tensor) in found.by_sequence() {
            let sums = tensor.to_dtype(DType::F32)?.sum(D::Minus1)?;
            if !is_finite(&sums, &mask)? {
                return Ok(NotFinite::new(name));
            }
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
