//! The composed twin of [`rms_norm`](crate::rms_norm()).

use candle_core::{D, Result, Tensor};

use super::check;
use crate::precision::arithmetic_dtype;

/// [`rms_norm`](crate::rms_norm()) in plain Candle operations.
pub fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    check(x, weight, epsilon)?;
    unchecked(x, weight, epsilon)
}

pub(crate) fn unchecked(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let wide = x.to_dtype(arithmetic_dtype(x.dtype()))?;
    let mean_square = (wide.sqr()?.sum_keepdim(D::Minus1)? / wide.dim(D::Minus1)? as f64)?;
    let scale = (mean_square + epsilon)?.sqrt()?.recip()?;
    wide.broadcast_mul(&scale)?
        .to_dtype(x.dtype())?
        .broadcast_mul(weight)
}
