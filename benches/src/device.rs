//! The device of the cases.

use candle_core::{Device, Result};

/// Returns the GPU if the program is built for one, else the CPU.
pub(crate) fn open() -> Result<Device> {
    #[cfg(feature = "cuda")]
    {
        candle_grpo_kernels::cuda_device(0)
    }
    #[cfg(not(feature = "cuda"))]
    Ok(Device::Cpu)
}

/// Returns the name of the device in the results.
pub(crate) fn name(device: &Device) -> &'static str {
    if device.is_cpu() { "cpu" } else { "cuda" }
}
