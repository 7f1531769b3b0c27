//! Chooses an operator's implementation.

use candle_core::{DType, Device, Tensor};

/// Returns whether `x` has a fused path: f32, bf16 or f16 on the CPU or CUDA. Other tensors use the
/// composed twin.
pub(crate) fn is_fused(x: &Tensor) -> bool {
    fuses(x.dtype(), x.device())
}

/// [`is_fused`] for a tensor that does not exist yet.
pub(crate) fn fuses(dtype: DType, device: &Device) -> bool {
    let has_kernels = match device {
        Device::Cpu => true,
        Device::Cuda(_) => cfg!(feature = "cuda"),
        Device::Metal(_) => false,
    };
    has_kernels && matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Like [`is_fused`], for operators without a CUDA kernel.
pub(crate) fn is_fused_on_cpu(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu) && is_fused(x)
}
