//! Inputs for the cases.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_grpo_test_support::{noise_tensor, token_ids};

/// Returns deterministic numbers in [-scale, scale).
pub(crate) fn noise(
    shape: impl Into<Shape>,
    scale: f64,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    if device.is_cpu() {
        return (noise_tensor(shape, seed, DType::F32, device)? * scale)?.to_dtype(dtype);
    }
    // The host would take seconds for GPU sizes.
    device.set_seed(seed)?;
    Tensor::rand(-scale as f32, scale as f32, shape, device)?.to_dtype(dtype)
}

/// Returns deterministic token ids below `vocab`.
pub(crate) fn ids(len: usize, vocab: usize, seed: u64, device: &Device) -> Result<Tensor> {
    Tensor::from_vec(token_ids(len, vocab, seed), len, device)
}
