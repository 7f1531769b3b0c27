//! The composed twin of [`add_bias`](crate::add_bias()).

use candle_core::{Result, Tensor};

use super::check;

/// [`add_bias`](crate::add_bias()) in plain Candle operations.
pub fn add_bias(pairs: &[(&Tensor, &Tensor)]) -> Result<Vec<Tensor>> {
    check(pairs)?;
    unchecked(pairs)
}

pub(crate) fn unchecked(pairs: &[(&Tensor, &Tensor)]) -> Result<Vec<Tensor>> {
    let sums = pairs.iter().map(|(x, bias)| match x.elem_count() {
        // Candle does not add empty tensors on CUDA.
        0 => Ok((*x).clone()),
        _ => x.broadcast_add(bias),
    });
    sums.collect()
}

/// Adds the row sum of a nonempty `gradient`, in the dtype of `sum`.
pub(crate) fn add_gradient(sum: &Tensor, gradient: &Tensor) -> Result<()> {
    let sum = sum.detach();
    let rows = gradient.detach().to_dtype(sum.dtype())?.sum(0)?;
    sum.slice_set(&(&sum + rows)?, 0, 0)
}
