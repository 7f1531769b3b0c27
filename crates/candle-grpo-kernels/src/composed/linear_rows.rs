//! The composed twin of [`linear_rows`](crate::linear_rows()).

use candle_core::{Result, Tensor};

/// [`linear_rows`](crate::linear_rows()) in plain Candle operations. The number of rows may change
/// the last bits of a row.
pub fn linear_rows(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    crate::linear_rows::check(x, weights)?;
    unchecked(x, weights)
}

pub(crate) fn unchecked(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    // Candle multiplies contiguous tensors and their transposes on every device, others on some.
    let x = x.detach().contiguous()?;
    weights
        .iter()
        .map(|weight| x.matmul(&weight.detach().contiguous()?.t()?))
        .collect()
}
