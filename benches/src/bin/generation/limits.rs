//! Machine limits.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_grpo_kernels::add_matmul;

/// Returns the shortest time over several runs of `run`, in seconds.
pub(crate) fn best_seconds(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Returns the bandwidth for uncached reads on all cores, in GB/s.
pub(crate) fn read_gb_s() -> Result<f64> {
    let values = vec![1f32; 1 << 28];
    let cores = std::thread::available_parallelism()?.get();
    let sum = |part: &[f32]| {
        // Enough independent sums to hide the latency of an addition.
        let mut sums = [0f32; 64];
        for chunk in part.chunks_exact(64) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += x;
            }
        }
        sums.iter().sum::<f32>()
    };
    let seconds = best_seconds(5, || {
        std::thread::scope(|scope| {
            for part in values.chunks(values.len().div_ceil(cores)) {
                scope.spawn(move || std::hint::black_box(sum(part)));
            }
        });
        Ok(())
    })?;
    Ok(size_of_val(values.as_slice()) as f64 / seconds / 1e9)
}

/// Returns the speed for a large matrix product, in GFLOP/s.
pub(crate) fn matmul_gflop_s(dtype: DType) -> Result<f64> {
    let (m, k, n) = (1024, 576, 12288);
    let a = Tensor::ones((m, k), dtype, &Device::Cpu)?;
    let b = Tensor::ones((n, k), dtype, &Device::Cpu)?;
    let sum = Tensor::zeros((m, n), DType::F32, &Device::Cpu)?;
    let seconds = best_seconds(5, || Ok(add_matmul(&sum, &a, &b.t()?)?))?;
    Ok(2. * (m * k * n) as f64 / seconds / 1e9)
}
