//! Counter-based random numbers: they depend on their purpose, not on execution order.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Random numbers for one completion. They depend only on these four numbers.
pub(crate) fn generator(seed: u64, stream: u64, prompt: u64, sample: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, number) in key.chunks_exact_mut(8).zip([seed, stream, prompt, sample]) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// A number in [0, 1) with 53 random bits.
pub(crate) fn uniform(generator: &mut ChaCha8Rng) -> f64 {
    (generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generators_differ_in_each_of_their_numbers() {
        let mut seen: Vec<u64> = (0..4)
            .map(|i| {
                let mut n = [0; 4];
                n[i] = 1;
                generator(n[0], n[1], n[2], n[3]).next_u64()
            })
            .collect();
        seen.push(generator(0, 0, 0, 0).next_u64());
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 5);
    }
}
