//! What an attention mask says: which tokens count, and where each stands.

use candle_core::{D, DType, Result, Tensor};

/// The mask as f32 zeros and ones.
pub(crate) fn to_zero_one(attention_mask: &Tensor) -> Result<Tensor> {
    attention_mask
        .to_dtype(DType::F32)?
        .ne(0f32)?
        .to_dtype(DType::F32)
}

/// `max(cumsum(mask) - 1, 0)` at the last `new` columns of a [B, past + new] mask, as f32 [B, new].
pub(crate) fn positions(mask: &Tensor, new: usize) -> Result<Tensor> {
    let past = mask.dim(1)? - new;
    // The past is only counted: cumsum costs the square of its length.
    let before = mask.narrow(1, 0, past)?.sum_keepdim(D::Minus1)?;
    let within = mask.narrow(1, past, new)?.contiguous()?.cumsum(1)?;
    (within.broadcast_add(&before)? - 1.0)?.maximum(0.0)
}
