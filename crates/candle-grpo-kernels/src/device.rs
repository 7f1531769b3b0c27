//! The device for this project's operators.

use candle_core::{Device, Result};

/// Returns the CUDA device `ordinal`, with one stream for all threads.
///
/// The first call opens the device, and later calls return the same one. Candle does not mix
/// tensors of a device that was opened twice, and nothing orders their streams. The settings differ
/// from those of `Device::new_cuda`:
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
    #[cfg(feature = "cuda")]
    return crate::cuda::device::open(ordinal);
    #[cfg(not(feature = "cuda"))]
    Device::new_cuda_with_stream(ordinal)
}

/// Returns the number of CUDA devices that this process sees, 0 without the feature `cuda`.
///
/// # Errors
///
/// Fails if the driver does not respond.
pub fn cuda_device_count() -> Result<usize> {
    #[cfg(feature = "cuda")]
    return crate::cuda::device::count();
    #[cfg(not(feature = "cuda"))]
    Ok(0)
}

/// Returns the first CUDA device in a build with the feature `cuda`, and the CPU in others.
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
