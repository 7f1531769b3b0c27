//! Memory of a GPU that other processes on the machine can open.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdeviceptr, CUipcMemHandle, CUipcMemHandle_st,
};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};
use candle_core::{Device, Error, Result, Tensor, bail};

use crate::gpu;
use crate::transfer::{MemoryHandle, SharedBuffer, SharedMemory};

/// The driver shares memory in pieces of this size, in bytes. A smaller allocation would share what
/// is beside it.
const SHARED: usize = 2 << 20;

/// Allocates memory that other processes open with CUDA IPC, such as the worker of a vLLM server on
/// the same GPU.
pub struct CudaIpc {
    device: Device,
}

impl CudaIpc {
    /// Allocates on the GPU `device`, with which the tensors must have been created.
    ///
    /// # Errors
    ///
    /// Fails if `device` is not a GPU.
    pub fn new(device: &Device) -> Result<Self> {
        device.as_cuda_device()?;
        Ok(Self {
            device: device.clone(),
        })
    }
}

impl SharedMemory for CudaIpc {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn SharedBuffer>> {
        if bytes == 0 {
            bail!("bytes: 0, must be at least 1");
        }
        let compute = self.device.as_cuda_device()?.cuda_stream();
        let context = compute.context();
        let stream = context.new_stream().map_err(Error::wrap)?;
        context.bind_to_thread().map_err(Error::wrap)?;
        let uuid = context.uuid().map_err(Error::wrap)?.bytes.map(byte);
        // Memory of a stream-ordered pool, as Candle's, has no handle of this kind.
        // SAFETY: the context is current.
        #[allow(unsafe_code)]
        let address = unsafe { result::malloc_sync(bytes.next_multiple_of(SHARED)) };
        let address = address.map_err(|error| {
            Error::msg(format!("a buffer of {bytes} bytes for CUDA IPC: {error}"))
        })?;
        let mut buffer = Buffer {
            device: self.device.clone(),
            stream,
            address,
            bytes,
            handle: CUipcMemHandle_st { reserved: [0; 64] },
            uuid,
        };
        // SAFETY: the address is that of an allocation, and the handle has room.
        #[allow(unsafe_code)]
        let shared = unsafe { sys::cuIpcGetMemHandle(&raw mut buffer.handle, address).result() };
        shared.map_err(|error| Error::msg(format!("CUDA IPC: {error}")))?;
        Ok(Box::new(buffer))
    }
}

struct Buffer {
    device: Device,
    /// The stream for copies.
    stream: Arc<CudaStream>,
    address: CUdeviceptr,
    bytes: usize,
    handle: CUipcMemHandle,
    uuid: [u8; 16],
}

/// C's characters are signed on some machines.
fn byte(of: std::ffi::c_char) -> u8 {
    of.to_ne_bytes()[0]
}

impl SharedBuffer for Buffer {
    fn handle(&self) -> MemoryHandle {
        MemoryHandle {
            memory: self.handle.reserved.map(byte),
            device: self.uuid,
        }
    }

    fn pack(&mut self, tensors: &[Tensor]) -> Result<()> {
        let context = self.stream.context();
        context.bind_to_thread().map_err(Error::wrap)?;
        gpu::pack(tensors, &self.device, &self.stream, |bytes| {
            if bytes > self.bytes {
                bail!(
                    "tensors: {bytes} bytes, must be at most the {} of the shared buffer",
                    self.bytes
                );
            }
            Ok(self.address)
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // After an error, the driver refuses all calls, and the memory ends with the process.
        if self.stream.context().bind_to_thread().is_err() || self.stream.synchronize().is_err() {
            return;
        }
        // SAFETY: nothing in this process uses the allocation.
        #[allow(unsafe_code)]
        let _ = unsafe { result::free_sync(self.address) };
    }
}
