//! Weights that are numbers.

use candle_core::{DType, Result, Tensor, bail};

/// Errs if a floating-point tensor has a NaN or an infinity.
pub(crate) fn ensure_finite(tensor: &Tensor) -> Result<()> {
    if !tensor.dtype().is_float() || tensor.elem_count() == 0 {
        return Ok(());
    }
    // Zero times a number is zero, unless the number is not finite. The sum keeps a NaN.
    let wide = match tensor.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let sum = (tensor.to_dtype(wide)? * 0.0)?.sum_all()?;
    if sum.to_dtype(DType::F64)?.to_scalar::<f64>()?.is_nan() {
        bail!("has a NaN or an infinity, weights must be finite");
    }
    Ok(())
}
