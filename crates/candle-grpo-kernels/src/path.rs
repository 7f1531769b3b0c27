//! Chooses an operator's implementation.

use candle_core::{DType, Device, Tensor};

/// Returns whether `x` has a fused path: f32, bf16 or f16 on the CPU or CUDA. Other tensors use the
/// composed twin.
pub(crate) fn is_fused(x: &Tensor) -> bool {
    let device = match x.device() {
        Device::Cpu => true,
        Device::Cuda(_) => cfg!(feature = "cuda"),
        Device::Metal(_) => false,
    };
    device && matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16)
}

/// Like [`is_fused`], for operators without a CUDA kernel.
pub(crate) fn is_fused_on_cpu(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu) && is_fused(x)
}
