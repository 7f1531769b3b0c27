//! Memory for results on the GPU.

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Result, Shape, Storage, Tensor};

/// Memory for `len` elements, which hold anything.
///
/// # Safety
///
/// Each must be written before it is read.
#[allow(unsafe_code)]
pub(crate) unsafe fn alloc<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // The driver has no memory of 0 bytes.
    // SAFETY: the caller's.
    unsafe { device.alloc::<T>(len.max(1)) }
}

/// A tensor without a history.
pub(crate) fn as_tensor(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(
        Storage::Cuda(storage),
        shape.clone(),
        BackpropOp::none(),
        false,
    )
}
