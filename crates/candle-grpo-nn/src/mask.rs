//! What an attention mask says: who sees whom, and where each token stands.

use candle_core::{D, DType, Result, Tensor};

/// Added to a score that must not count. Finite, so that a row in which nothing is visible (a padding query) gives
/// equal weights instead of NaN; so large that beside any visible score its exponential is exactly zero.
const HIDDEN: f64 = -1e30;

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

/// The bias [B, 1, new, past + new] to add to attention scores: zero where a query may look, [`HIDDEN`] at padded
/// keys and at keys after the query.
pub(crate) fn attention_bias(mask: &Tensor, new: usize, dtype: DType) -> Result<Tensor> {
    let (batch, total) = mask.dims2()?;
    let mut visible = mask.reshape((batch, 1, 1, total))?;
    // A single new token comes after all keys.
    if new > 1 {
        let device = mask.device();
        let keys = Tensor::arange(0, total as u32, device)?.reshape((1, total))?;
        let queries =
            Tensor::arange((total - new) as u32, total as u32, device)?.reshape((new, 1))?;
        let causal = keys.broadcast_le(&queries)?.to_dtype(DType::F32)?;
        visible = visible.broadcast_mul(&causal.reshape((1, 1, new, total))?)?;
    }
    visible.affine(-HIDDEN, HIDDEN)?.to_dtype(dtype)
}
