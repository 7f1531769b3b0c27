//! Pseudo-random inputs.

use candle_core::{DType, Device, Result, Shape, Tensor};

/// Returns pseudo-random numbers in [-scale, scale), determined by `seed`.
pub(crate) fn noise(
    shape: impl Into<Shape>,
    scale: f32,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| scale * ((next(&mut state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
        .collect();
    Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
}

/// Returns token ids below `vocab`.
pub(crate) fn ids(len: usize, vocab: usize, seed: u64, device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let ids: Vec<u32> = (0..len)
        .map(|_| ((next(&mut state) >> 33) % vocab as u64) as u32)
        .collect();
    Tensor::from_vec(ids, len, device)
}

/// Marsaglia's xorshift64.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
