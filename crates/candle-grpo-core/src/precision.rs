//! The dtypes in which things are computed and returned.

use candle_core::{DType, Device, Tensor};

/// The dtype of results: f64 stays f64, everything else gives f32.
pub fn result_dtype(input: DType) -> DType {
    if input == DType::F64 {
        DType::F64
    } else {
        DType::F32
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
