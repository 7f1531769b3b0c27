//! The dtypes in which things are computed and returned.

use candle_core::{DType, Device, Tensor};

pub use candle_grpo_kernels::arithmetic_dtype;

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
