//! Launches of the kernels that process tensors of one shape element by element.

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

use super::grid;

/// Threads of a block and bytes of each argument for a thread, as in `elements.cuh`.
const THREADS: u32 = 256;
const BYTES: usize = 2 * 16;

/// Returns the blocks for `n` elements.
pub(crate) fn blocks<T>(n: usize) -> Result<LaunchConfig> {
    grid(
        n.div_ceil(THREADS as usize * BYTES / size_of::<T>()),
        THREADS,
    )
}
