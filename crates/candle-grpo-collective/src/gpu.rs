//! The memory of tensors on a GPU.

use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, result};
use candle_core::{DType, Device, Error, Result, Storage, Tensor, bail};

/// A contiguous tensor's elements on the device.
pub(crate) struct Memory {
    pub(crate) address: u64,
    pub(crate) elements: usize,
    pub(crate) dtype: DType,
}

/// A contiguous tensor's memory on the GPU, for operations on `stream`.
pub(crate) fn memory(tensor: &Tensor, stream: &CudaStream) -> Result<Memory> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!(
            "a tensor is on {:?}, must be on the GPU",
            tensor.device().location()
        );
    };
    let start = match &storage.slice {
        CudaStorageSlice::U8(values) => values.device_ptr(stream).0,
        CudaStorageSlice::U32(values) => values.device_ptr(stream).0,
        CudaStorageSlice::I16(values) => values.device_ptr(stream).0,
        CudaStorageSlice::I32(values) => values.device_ptr(stream).0,
        CudaStorageSlice::I64(values) => values.device_ptr(stream).0,
        CudaStorageSlice::BF16(values) => values.device_ptr(stream).0,
        CudaStorageSlice::F16(values) => values.device_ptr(stream).0,
        CudaStorageSlice::F32(values) => values.device_ptr(stream).0,
        CudaStorageSlice::F64(values) => values.device_ptr(stream).0,
        _ => bail!(
            "a tensor is {:?}, must be an integer or a float of 16 to 64 bits",
            tensor.dtype()
        ),
    };
    let dtype = tensor.dtype();
    Ok(Memory {
        address: start + (layout.start_offset() * dtype.size_in_bytes()) as u64,
        elements: tensor.elem_count(),
        dtype,
    })
}

/// Copies the bytes of `tensors`, one after another without gaps, to the address that `room`
/// returns for their number, on `stream`. The tensors may change afterward. Tensors on the CPU go
/// through `device`, to whose memory the address belongs.
///
/// # Errors
///
/// Fails if a tensor is on another handle of a GPU, or if `room` fails.
pub(crate) fn pack(
    tensors: &[Tensor],
    device: &Device,
    stream: &Arc<CudaStream>,
    room: impl FnOnce(usize) -> Result<u64>,
) -> Result<()> {
    let on_device = |tensor: &Tensor| -> Result<Tensor> {
        let of = tensor.device();
        if of.is_cuda() && !of.same_device(device) {
            bail!(
                "a tensor is on another handle of a GPU ({:?}), must be on the one that sends",
                of.location()
            );
        }
        tensor.detach().to_device(device)?.contiguous()
    };
    let tensors: Vec<Tensor> = tensors.iter().map(on_device).collect::<Result<_>>()?;
    let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    let mut to = room(tensors.iter().map(bytes).sum())?;
    let compute = device.as_cuda_device()?.cuda_stream();
    stream.join(&compute).map_err(Error::wrap)?;
    for tensor in tensors.iter().filter(|tensor| tensor.elem_count() > 0) {
        let from = memory(tensor, stream)?.address;
        let bytes = bytes(tensor);
        // SAFETY: both are allocations with as many bytes on this device. The stream has waited
        // for the kernels that write the tensor.
        #[allow(unsafe_code)]
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) };
        copied.map_err(Error::wrap)?;
        to += bytes as u64;
    }
    stream.synchronize().map_err(Error::wrap)
}
