//! The composed twin of [`rope`](crate::rope()).

use candle_core::{D, Result, Tensor};

use super::check;

/// [`rope`](crate::rope()) in plain Candle operations.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    check(x, cos, sin)?;
    unchecked(x, cos, sin)
}

pub(crate) fn unchecked(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let pairs = cos.dim(D::Minus1)?;
    let heads = x.dim(D::Minus1)? / (2 * pairs);
    let rows = cos.elem_count() / pairs;
    let wide = x.to_dtype(cos.dtype())?.reshape((rows, heads, 2, pairs))?;
    let (first, second) = (wide.narrow(2, 0, 1)?, wide.narrow(2, 1, 1)?);
    let cos = cos.detach().reshape((rows, 1, 1, pairs))?;
    let sin = sin.detach().reshape((rows, 1, 1, pairs))?;
    let rotated_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let rotated_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    Tensor::cat(&[rotated_first, rotated_second], 2)?
        .reshape(x.shape())?
        .to_dtype(x.dtype())
}
