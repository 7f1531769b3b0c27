//! The stretch of a run that counts.

use std::time::Instant;

use candle_core::{Device, Result};

use crate::allocator;

/// What one run took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Milliseconds.
    pub(crate) ms: f64,
    /// The most memory that was alive at once, beyond what was alive at the start, in MiB. Host memory.
    pub(crate) peak_mib: f64,
}

/// Times `work`, with the release of what it returns.
pub(crate) fn region<R>(device: &Device, work: impl FnOnce() -> Result<R>) -> Result<Sample> {
    device.synchronize()?;
    let before = allocator::restart_peak();
    let start = Instant::now();
    drop(work()?);
    device.synchronize()?;
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let peak_mib = (allocator::peak() - before) as f64 / (1 << 20) as f64;
    Ok(Sample { ms, peak_mib })
}
