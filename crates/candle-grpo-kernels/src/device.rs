//! Devices for this project's operators.

use std::ffi::OsStr;

use candle_core::{Device, Result};

/// Returns the CUDA device `ordinal`, with one stream for all threads.
///
/// The first call opens the device, and later calls return the same one. If you open a device
/// twice, Candle cannot mix their tensors, and nothing orders their streams. The settings differ
/// from `Device::new_cuda`:
///
/// - All threads share one stream, so operations run in call order. With `Device::new_cuda`, each
///   thread has its own stream, without any order between them.
/// - Candle's events, which order several streams, are off. They double the number of driver calls.
/// - Freed memory stays in the driver's pool. By default each synchronization returns it to the
///   system.
///
/// # Errors
///
/// Fails without the feature `cuda`, or if there is no device with this ordinal.
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

/// Returns the number of CUDA devices visible to this process, 0 without the feature `cuda`.
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

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Memory that no process uses.
    pub free: usize,
    /// All memory.
    pub total: usize,
}

/// Returns the memory of a CUDA device.
///
/// # Errors
///
/// Fails if `device` is not a CUDA device, or the driver does not respond.
pub fn cuda_memory(device: &Device) -> Result<DeviceMemory> {
    #[cfg(feature = "cuda")]
    return crate::cuda::device::memory(device);
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!(
        "device: {:?}, must be a CUDA device, in a program with the feature cuda",
        device.location()
    )
}

/// Returns memory to the GPU `device` that tensors no longer use, for other processes. Otherwise,
/// this process keeps it for later tensors. Waits for the work on the device. On the CPU, there is
/// nothing to do.
///
/// # Errors
///
/// Fails if the driver does not respond, or if work on the device has failed.
pub fn release_cuda_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return crate::cuda::device::release_memory(device);
    }
    let _ = device;
    Ok(())
}

/// Returns whether this process computes on CUDA devices. This requires the feature `cuda`, and is
/// off if the variable `CUDA_VISIBLE_DEVICES` hides all devices: if it is empty, or begins with -1
/// or `NoDevFiles`.
///
/// ```
/// if candle_grpo_kernels::cuda_is_enabled() {
///     println!("training on {} GPUs", candle_grpo_kernels::cuda_device_count()?);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cuda_is_enabled() -> bool {
    let visible = std::env::var_os("CUDA_VISIBLE_DEVICES");
    candle_core::utils::cuda_is_available() && !visible.is_some_and(|devices| hides_all(&devices))
}

fn hides_all(devices: &OsStr) -> bool {
    let devices = devices.to_string_lossy();
    let first = devices.split(',').next().unwrap_or_default();
    matches!(first.trim(), "" | "-1" | "NoDevFiles")
}

/// Returns the first CUDA device if [`cuda_is_enabled`], and the CPU otherwise.
///
/// # Errors
///
/// Fails with the feature `cuda` if there is no device and `CUDA_VISIBLE_DEVICES` does not hide
/// them all.
///
/// ```no_run
/// let device = candle_grpo_kernels::default_device()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn default_device() -> Result<Device> {
    if cuda_is_enabled() {
        cuda_device(0)
    } else {
        Ok(Device::Cpu)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn an_empty_list_of_devices_hides_all(
        #[values(("", true), (" ", true), ("-1", true), ("-1,0", true), ("NoDevFiles", true), ("0", false), ("1,0", false), ("GPU-8932f937", false))]
        case: (&str, bool),
    ) {
        assert_eq!(hides_all(OsStr::new(case.0)), case.1);
    }
}
