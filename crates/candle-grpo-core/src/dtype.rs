//! The dtypes in which things are computed and returned.

use candle_core::{DType, Device, Tensor};

/// The dtype in which sums and exponentials of `dtype` are computed: f64 for f64, f32 for all others.
pub fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// The dtype of sums and variances: f64, or f32 on Metal, which has no f64.
pub fn statistics_dtype(device: &Device) -> DType {
    if device.is_metal() {
        DType::F32
    } else {
        DType::F64
    }
}

/// `x` in the dtype of [`statistics_dtype`], without a graph.
pub(crate) fn for_statistics(x: &Tensor) -> candle_core::Result<Tensor> {
    x.detach().to_dtype(statistics_dtype(x.device()))
}
