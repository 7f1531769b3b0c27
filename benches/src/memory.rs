//! A run's memory.

use candle_core::{Device, Result};

use crate::allocator;

/// Measures memory since its start, in the program's allocator or the GPU's pool.
pub(crate) struct Meter {
    before: usize,
}

impl Meter {
    /// Resets the peak. The device must have completed its work.
    pub(crate) fn start(device: &Device) -> Result<Self> {
        let before = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::restart_peak(device)?,
            _ => allocator::restart_peak(),
        };
        Ok(Self { before })
    }

    /// Returns the peak since the start, beyond the memory at the start, in MiB.
    pub(crate) fn peak_mib(&self, device: &Device) -> Result<f64> {
        let peak = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::peak(device)?,
            _ => allocator::peak(),
        };
        Ok(peak.saturating_sub(self.before) as f64 / (1 << 20) as f64)
    }
}

/// The pool from which Candle allocates on the GPU.
#[cfg(feature = "cuda")]
mod pool {
    use candle_core::cuda_backend::cudarc::driver::result::{device, mem_pool};
    use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool};
    use candle_core::{CudaDevice, Error, Result};

    /// Resets the peak and returns the bytes in use.
    pub(super) fn restart_peak(device: &CudaDevice) -> Result<usize> {
        let pool = of(device)?;
        set(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)?;
        get(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Returns the peak of bytes in use since [`restart_peak`].
    pub(super) fn peak(device: &CudaDevice) -> Result<usize> {
        get(
            of(device)?,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        )
    }

    fn of(candle: &CudaDevice) -> Result<CUmemoryPool> {
        // SAFETY: the device is open.
        #[allow(unsafe_code)]
        unsafe { device::get_default_mem_pool(candle.cuda_stream().context().cu_device()) }
            .map_err(Error::wrap)
    }

    fn set(pool: CUmemoryPool, attribute: CUmemPool_attribute, mut value: u64) -> Result<()> {
        // SAFETY: the pool is the default pool of a device, and this attribute has 64 bits.
        #[allow(unsafe_code)]
        unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut value).cast()) }
            .map_err(Error::wrap)
    }

    fn get(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Result<usize> {
        let mut value = 0u64;
        // SAFETY: the pool is the default pool of a device, and this attribute has 64 bits.
        #[allow(unsafe_code)]
        unsafe { mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()) }
            .map_err(Error::wrap)?;
        Ok(value as usize)
    }
}
