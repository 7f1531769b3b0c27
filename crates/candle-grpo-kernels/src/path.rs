//! Which implementation an operator takes.

use candle_core::{DType, Device, Tensor};

/// Whether the fused path takes `x`: f32, bf16 or f16 on the CPU or on CUDA. Everything else goes to the composed twin.
pub(crate) fn is_fused(x: &Tensor) -> bool {
    let device = match x.device() {
        Device::Cpu => true,
        Device::Cuda(_) => cfg!(feature = "cuda"),
        Device::Metal(_) => false,
    };
    device && matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16)
}

/// [`is_fused`] for operators that have no path on CUDA yet.
pub(crate) fn is_fused_on_cpu(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu) && is_fused(x)
}
