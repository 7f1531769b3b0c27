//! Data types for computations and results.

use candle_core::{DType, Device, Result, Tensor};

/// Returns the dtype in which an input with `dtype` is computed and returned: f64 for f64, f32 for
/// all others.
pub fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Returns the dtype for sums and variances: f64, or f32 on Metal, which has no f64.
pub fn statistics_dtype(device: &Device) -> DType {
    if device.is_metal() {
        DType::F32
    } else {
        DType::F64
    }
}

/// Converts `x` to the statistics dtype, detached.
pub(crate) fn for_statistics(x: &Tensor) -> Result<Tensor> {
    let dtype = statistics_dtype(x.device());
    match x.elem_count() {
        // Candle does not convert empty tensors on CUDA.
        0 => Tensor::zeros(x.shape(), dtype, x.device()),
        _ => x.detach().to_dtype(dtype),
    }
}
