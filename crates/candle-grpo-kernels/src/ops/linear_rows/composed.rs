//! The composed twin of [`linear_rows`](crate::linear_rows()).

use candle_core::{DType, Result, Tensor};

/// [`linear_rows`](crate::linear_rows()) in plain Candle operations. A row's last bits may depend
/// on the number of rows.
pub fn linear_rows(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    super::check(x, weights)?;
    unchecked(x, weights)
}

pub(crate) fn unchecked(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    // Candle multiplies contiguous tensors and their transposes on every device, but others only on
    // some.
    let x = x.detach().contiguous()?;
    weights
        .iter()
        .map(|weight| {
            let weight = match weight.dtype() {
                DType::U8 => crate::dequantize(weight, x.dtype())?,
                _ => weight.detach(),
            };
            x.matmul(&weight.contiguous()?.t()?)
        })
        .collect()
}
