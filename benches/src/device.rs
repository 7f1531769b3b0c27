//! Where the cases run.

use candle_core::{Device, Result};

/// The GPU when this is built for one, else the CPU.
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

/// Its name in the results.
pub(crate) fn name(device: &Device) -> &'static str {
    if device.is_cpu() { "cpu" } else { "cuda" }
}
