//! Standard normal random numbers.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Samples standard normal numbers from a seed (Box-Muller). Candle's own generator cannot be
/// seeded on the CPU.
pub(crate) struct StandardNormal {
    generator: ChaCha8Rng,
    spare: Option<f64>,
}

impl StandardNormal {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            generator: ChaCha8Rng::seed_from_u64(seed),
            spare: None,
        }
    }

    pub(crate) fn draw(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        // The half keeps the logarithm finite.
        let radius = (-2.0 * ((self.bits53() + 0.5) / UNIT).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.bits53() / UNIT).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    fn bits53(&mut self) -> f64 {
        (self.generator.next_u64() >> 11) as f64
    }
}

/// 2^53, how many random integers there are.
const UNIT: f64 = (1u64 << 53) as f64;
