//! Log-softmax in plain Candle operations.

use candle_core::{D, Result, Tensor};

/// Computes `x - log sum exp(x)` along the last dimension. Entries of minus infinity stay as they
/// are; at least one entry must be finite.
pub(crate) fn log_softmax(x: &Tensor) -> Result<Tensor> {
    // Relative to the maximum, so that `exp` does not overflow.
    let shifted = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?;
    let total = shifted.exp()?.sum_keepdim(D::Minus1)?;
    shifted.broadcast_sub(&total.log()?)
}

/// Computes `log sum exp(x)` along the last dimension, which is kept with the size 1. It is minus
/// infinity, without a gradient, if no entry is finite.
pub(crate) fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let largest = x.detach().max_keepdim(D::Minus1)?;
    let none = largest.eq(f64::NEG_INFINITY)?;
    let largest = none.where_cond(&largest.zeros_like()?, &largest)?;
    let total = x.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
    let total = none.where_cond(&total.ones_like()?, &total)?;
    let sum = (total.log()? + &largest)?;
    none.where_cond(&(largest + f64::NEG_INFINITY)?, &sum)
}
