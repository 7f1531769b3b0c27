//! This process's devices and their settings.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::result::{device, mem_pool};
use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute, cuDeviceGraphMemTrim};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream};
use candle_core::{CudaDevice, Device, Error, Result, bail};

use crate::DeviceMemory;

/// The handle for `CU_STREAM_PER_THREAD`, the stream that differs between threads.
const PER_THREAD: usize = 2;

/// Returns the device `ordinal`, opening it on the first call.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    static OPEN: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = open.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Device::new_cuda_with_stream(ordinal)?;
    prepare(device.as_cuda_device()?)?;
    open.insert(ordinal, device.clone());
    Ok(device)
}

/// Returns the number of devices visible to this process.
pub(crate) fn count() -> Result<usize> {
    let count = CudaContext::device_count().map_err(Error::wrap)?;
    usize::try_from(count).map_err(Error::wrap)
}

/// Returns the memory of a device.
pub(crate) fn memory(device: &Device) -> Result<DeviceMemory> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let (free, total) = stream.context().mem_get_info().map_err(Error::wrap)?;
    Ok(DeviceMemory { free, total })
}

/// Returns freed memory to a device.
pub(crate) fn release_memory(device: &Device) -> Result<()> {
    let stream = device.as_cuda_device()?.cuda_stream();
    release_pool(&stream)?;
    release_recordings_memory(&stream)
}

/// Returns freed memory of tensors to a device.
pub(crate) fn release_pool(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    context.bind_to_thread().map_err(Error::wrap)?;
    // The pool keeps memory whose free is still in the stream.
    stream.synchronize().map_err(Error::wrap)?;
    // SAFETY: the device is open.
    #[allow(unsafe_code)]
    unsafe {
        let pool = device::get_default_mem_pool(context.cu_device()).map_err(Error::wrap)?;
        mem_pool::trim_to(pool, 0).map_err(Error::wrap)
    }
}

/// Returns the memory that recordings used to a device. Their next run takes it again.
pub(crate) fn release_recordings_memory(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    context.bind_to_thread().map_err(Error::wrap)?;
    // The driver keeps memory whose use is still in the stream.
    stream.synchronize().map_err(Error::wrap)?;
    // SAFETY: the device is open.
    #[allow(unsafe_code)]
    unsafe { cuDeviceGraphMemTrim(context.cu_device()) }
        .result()
        .map_err(Error::wrap)
}

/// Turns off events and keeps freed memory.
fn prepare(candle: &CudaDevice) -> Result<()> {
    // SAFETY: the device has one stream, which orders all uses and frees.
    #[allow(unsafe_code)]
    unsafe {
        candle.disable_event_tracking();
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device is open, and the attribute has 64 bits.
    #[allow(unsafe_code)]
    unsafe {
        let pool = device::get_default_mem_pool(candle.cuda_stream().context().cu_device())
            .map_err(Error::wrap)?;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast()).map_err(Error::wrap)
    }
}

/// Returns a device's stream. Rejects one that differs between threads.
pub(crate) fn stream(candle: &CudaDevice) -> Result<Arc<CudaStream>> {
    let stream = candle.cuda_stream();
    if stream.cu_stream() as usize == PER_THREAD {
        bail!(
            "device: its stream differs between threads, must be one stream: open it with cuda_device, default_device or Device::new_cuda_with_stream in place of Device::new_cuda or Device::cuda_if_available"
        );
    }
    Ok(stream)
}
