//! Allocates results on the GPU.

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Result, Shape, Storage, Tensor};

/// Allocates `len` uninitialized elements.
///
/// # Safety
///
/// Each element must be written before it is read.
#[allow(unsafe_code)]
pub(crate) unsafe fn alloc<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // The driver cannot allocate 0 bytes. SAFETY: the caller's promise.
    unsafe { device.alloc::<T>(len.max(1)) }
}

/// Returns a tensor without a graph.
pub(crate) fn as_tensor(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(
        Storage::Cuda(storage),
        shape.clone(),
        BackpropOp::none(),
        false,
    )
}
