//! Weights that are numbers.

use candle_core::{DType, Result, Tensor, bail};

/// Errs if a floating-point tensor a NaN or an infinity, as stored or in f32, which weights become.
pub(crate) fn ensure_finite(tensor: &Tensor) -> Result<()> {
    if !tensor.dtype().is_float() || tensor.elem_count() == 0 {
        return Ok(());
    }
    // Zero times a number is zero, unless the number is not finite. The sum keeps a NaN.
    let sum = (tensor.to_dtype(DType::F32)? * 0.0)?.sum_all()?;
    if sum.to_scalar::<f32>()?.is_nan() {
        bail!("a NaN or an infinity in f32, must be finite");
    }
    Ok(())
}
