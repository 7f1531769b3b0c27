//! The composed twin of [`embedding`](crate::embedding()).

use candle_core::{Result, Tensor};

use super::shape;
use crate::check;

/// [`embedding`](crate::embedding()) in plain Candle operations. bf16 and f16 gradients are summed
/// in their dtype.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let shape = shape(ids, weight)?;
    let ids = check::token_ids("ids", ids, weight.dims()[0], None)?;
    rows(&ids, weight)?.reshape(shape)
}

/// Returns the rows at `ids`, u32 `[N]`.
pub(crate) fn rows(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if ids.elem_count() == 0 {
        // Candle cannot select nothing on CUDA.
        return weight.narrow(0, 0, 0);
    }
    weight.contiguous()?.index_select(ids, 0)
}

/// Adds the rows in `gradient` to the rows in `sum` at `ids`, u32 `[N]`, in place.
pub(crate) fn add_rows(sum: &Tensor, ids: &Tensor, gradient: &Tensor) -> Result<()> {
    let rows = gradient
        .reshape((ids.dim(0)?, sum.dim(1)?))?
        .to_dtype(sum.dtype())?;
    if rows.elem_count() == 0 {
        return Ok(());
    }
    let sum = sum.detach();
    sum.slice_set(&sum.index_add(ids, &rows, 0)?, 0, 0)
}
