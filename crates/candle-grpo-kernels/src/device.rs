//! The device for this project's operators.

use candle_core::{Device, Result};

/// Opens the CUDA device `ordinal`, with one stream for all threads.
///
/// Open a device once in a process. Its settings differ from those of `Device::new_cuda`:
///
/// - All threads share one stream, so operations run in the order of the calls. With
///   `Device::new_cuda` each thread has a stream of its own, and no order exists between them.
/// - Candle's events, which order several streams, are off. They double the calls of the driver.
/// - Freed memory stays in the driver's pool. By default each synchronization returns it to the
///   system.
///
/// # Errors
///
/// Fails without the feature `cuda`, and without a device of this ordinal.
///
/// ```no_run
/// let device = candle_grpo_kernels::cuda_device(0)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cuda_device(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    #[cfg(feature = "cuda")]
    crate::cuda::device::prepare(device.as_cuda_device()?)?;
    Ok(device)
}

/// Opens the first CUDA device in a build with the feature `cuda`, and the CPU in others.
///
/// # Errors
///
/// Fails in a build with the feature if there is no device.
///
/// ```no_run
/// let device = candle_grpo_kernels::default_device()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn default_device() -> Result<Device> {
    match candle_core::utils::cuda_is_available() {
        true => cuda_device(0),
        false => Ok(Device::Cpu),
    }
}
