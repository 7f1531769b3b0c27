//! The stretch of a run that counts.

use std::time::Instant;

use candle_core::{Device, Result};

use crate::memory::Meter;

/// How often a GPU works on what is measured: it begins the next run while the host prepares the one after.
const RUNS_ON_A_GPU: u32 = 10;

/// What one run took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Milliseconds.
    pub(crate) ms: f64,
    /// The most memory of the device that was alive at once, beyond what was alive at the start, in MiB.
    pub(crate) peak_mib: f64,
}

/// Times `work`, with the release of what it returns, by a clock that waits for the device before and after.
pub(crate) fn region<R>(device: &Device, mut work: impl FnMut() -> Result<R>) -> Result<Sample> {
    let runs = if device.is_cpu() { 1 } else { RUNS_ON_A_GPU };
    device.synchronize()?;
    let memory = Meter::start(device)?;
    let start = Instant::now();
    for _ in 0..runs {
        drop(work()?);
    }
    device.synchronize()?;
    let ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(runs);
    Ok(Sample {
        ms,
        peak_mib: memory.peak_mib(device)?,
    })
}
