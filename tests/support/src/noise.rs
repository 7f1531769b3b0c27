//! Deterministic pseudorandom inputs.

use candle_core::{DType, Device, Result, Shape, Tensor};

/// Returns `len` numbers in [-1, 1), determined by `seed`.
pub fn noise(len: usize, seed: u64) -> Vec<f64> {
    words(seed)
        .map(|word| (word >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
        .take(len)
        .collect()
}

/// Returns a tensor with [`noise`].
///
/// # Errors
///
/// Fails if the device does not have enough memory or does not support `dtype`.
pub fn noise_tensor(
    shape: impl Into<Shape>,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    let values = noise(shape.elem_count(), seed);
    Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
}

/// Returns `len` token ids below `vocab`, determined by `seed`.
pub fn token_ids(len: usize, vocab: usize, seed: u64) -> Vec<u32> {
    words(seed)
        .map(|word| ((word >> 33) % vocab as u64) as u32)
        .take(len)
        .collect()
}

/// Returns SplitMix64's endless output (<https://doi.org/10.1145/2714064.2660195>), determined by
/// `seed`.
pub fn words(seed: u64) -> impl Iterator<Item = u64> {
    (1u64..).map(move |i| {
        let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published generator's first words for seed 1234567.
    #[test]
    fn words_are_those_of_splitmix64() {
        let expected = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ];
        assert!(words(1234567).take(5).eq(expected));
    }

    #[test]
    fn noise_is_uniform_in_minus_one_to_one() {
        let values = noise(10_000, 0);
        assert!(values.iter().all(|x| (-1.0..1.0).contains(x)));
        let mean = |f: fn(f64) -> f64| values.iter().map(|&x| f(x)).sum::<f64>() / 1e4;
        assert!(mean(|x| x).abs() < 0.03);
        assert!((mean(|x| x * x) - 1.0 / 3.0).abs() < 0.02);
    }
}
