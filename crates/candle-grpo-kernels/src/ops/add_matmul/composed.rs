//! The composed twin of [`add_matmul`](crate::add_matmul()).

use candle_core::{Result, Tensor};

use super::check;

/// [`add_matmul`](crate::add_matmul()) in plain Candle operations. bf16 and f16 are multiplied in
/// their dtype.
pub fn add_matmul(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    check(sum, a, b)?;
    unchecked(sum, a, b)
}

pub(crate) fn unchecked(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if sum.elem_count() == 0 || a.elem_count() == 0 {
        return Ok(());
    }
    // Candle multiplies contiguous tensors on every device, but others only on some.
    let (a, b) = (a.detach().contiguous()?, b.detach().contiguous()?);
    let product = a.matmul(&b)?.to_dtype(sum.dtype())?;
    let sum = sum.detach();
    sum.slice_set(&(&sum + product)?, 0, 0)
}
