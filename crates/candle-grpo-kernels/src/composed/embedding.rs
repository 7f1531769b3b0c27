//! The composed twin of [`embedding`](crate::embedding()).

use candle_core::{Result, Tensor};

use crate::check;
use crate::embedding::shape;

/// [`embedding`](crate::embedding()) in plain Candle operations. Half types sum the gradient in themselves.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let shape = shape(ids, weight)?;
    let ids = check::token_ids("ids", ids, weight.dims()[0], None)?;
    rows(&ids, weight)?.reshape(shape)
}

/// `ids` is `[N]` of u32.
pub(crate) fn rows(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    weight.contiguous()?.index_select(ids, 0)
}
