//! The device of the cases.

use candle_core::{Device, Result};

/// Returns the GPU if the program is built for one, else the CPU.
pub(crate) fn open() -> Result<Device> {
    #[cfg(feature = "cuda")]
    {
        let device = Device::new_cuda_with_stream(0)?;
        crate::memory::keep(device.as_cuda_device()?)?;
        Ok(device)
    }
    #[cfg(not(feature = "cuda"))]
    Ok(Device::Cpu)
}

/// Returns the name of the device in the results.
pub(crate) fn name(device: &Device) -> &'static str {
    if device.is_cpu() { "cpu" } else { "cuda" }
}
