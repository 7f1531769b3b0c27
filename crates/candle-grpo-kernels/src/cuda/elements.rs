//! Launches elementwise kernels on tensors with equal shapes.

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

use super::grid;

/// Threads per block and bytes per argument and thread, as in `elements.cuh`.
const THREADS: u32 = 256;
const BYTES: usize = 2 * 16;

/// Returns the launch for `n` elements.
pub(crate) fn blocks<T>(n: usize) -> Result<LaunchConfig> {
    grid(
        n.div_ceil(THREADS as usize * BYTES / size_of::<T>()),
        THREADS,
    )
}
