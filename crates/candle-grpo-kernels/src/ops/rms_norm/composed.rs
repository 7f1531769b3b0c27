//! The composed twin of [`rms_norm`](crate::rms_norm()).

use candle_core::{D, Result, Tensor};

use super::{RmsNormOptions, check};
use crate::precision::arithmetic_dtype;

/// [`rms_norm`](crate::rms_norm()) in plain Candle operations.
pub fn rms_norm(x: &Tensor, weight: &Tensor, options: impl Into<RmsNormOptions>) -> Result<Tensor> {
    let options = options.into();
    check(x, weight, options)?;
    unchecked(x, weight, options)
}

pub(crate) fn unchecked(x: &Tensor, weight: &Tensor, options: RmsNormOptions) -> Result<Tensor> {
    let wide = x.to_dtype(arithmetic_dtype(x.dtype()))?;
    let mean_square = (wide.sqr()?.sum_keepdim(D::Minus1)? / wide.dim(D::Minus1)? as f64)?;
    let scale = (mean_square + options.epsilon)?.sqrt()?.recip()?;
    let normed = wide.broadcast_mul(&scale)?;
    if options.is_offset {
        let factor = (weight.to_dtype(wide.dtype())? + 1.0)?;
        return normed.broadcast_mul(&factor)?.to_dtype(x.dtype());
    }
    normed.to_dtype(x.dtype())?.broadcast_mul(weight)
}
