//! What the machine can do at best.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

/// The best of some runs of `run`, in seconds.
pub(crate) fn best_seconds(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// GB a second at which all cores together read memory that is in no cache.
pub(crate) fn read_gb_s() -> Result<f64> {
    let values = vec![1f32; 1 << 28];
    let cores = std::thread::available_parallelism()?.get();
    let sum = |part: &[f32]| {
        // So many sums that they do not wait for each other.
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

/// GFLOP a second of a large matrix product, as Candle computes it.
pub(crate) fn matmul_gflop_s() -> Result<f64> {
    let (m, k, n) = (1024, 576, 12288);
    let a = Tensor::ones((m, k), DType::F32, &Device::Cpu)?;
    let b = Tensor::ones((n, k), DType::F32, &Device::Cpu)?;
    let seconds = best_seconds(5, || {
        a.matmul(&b.t()?)?;
        Ok(())
    })?;
    Ok(2. * (m * k * n) as f64 / seconds / 1e9)
}
