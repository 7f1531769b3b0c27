//! The measured part of a run.

use std::time::Instant;

use candle_core::{Device, Result};

use crate::memory::Meter;

/// Number of runs per sample on a GPU. The host enqueues the next run while the GPU works.
const RUNS_ON_A_GPU: u32 = 10;

/// The cost of one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// The time in milliseconds.
    pub(crate) ms: f64,
    /// Peak device memory in MiB, beyond the memory at the start.
    pub(crate) peak_mib: f64,
}

/// Times `work`, including the release of its result. Synchronizes with the device before and
/// after.
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
