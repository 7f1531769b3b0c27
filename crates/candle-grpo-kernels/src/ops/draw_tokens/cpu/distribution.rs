//! Samples one token from one row of logits.

use pulp::{Simd, WithSimd};

use crate::cpu::instructions::vectors;
use crate::cpu::simd::{EXP_UNDERFLOW, LaneSums, at_least, exp};
use crate::ops::log_prob::cpu::{ForwardRow, Sums};

/// Number of tokens per block with a cached sum.
const BLOCK: usize = 512;

/// Unnormalized softmax(logits / temperature).
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    greatest: f64,
    inverse_temperature: f64,
    /// Weight sums for each block of [`BLOCK`] tokens.
    blocks: Vec<f64>,
    total: f64,
}

impl<'a> Distribution<'a> {
    /// Computes a row's weights. `None` if a logit is NaN or infinity, or all are minus infinity.
    pub(crate) fn new(logits: &'a [f32], temperature: f64) -> Option<Self> {
        if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return None;
        }
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if greatest == f32::NEG_INFINITY {
            return None;
        }
        let mut distribution = Self {
            logits,
            greatest: f64::from(greatest),
            inverse_temperature: 1. / temperature,
            blocks: Vec::with_capacity(logits.len().div_ceil(BLOCK)),
            total: 0.,
        };
        vectors().dispatch(BlockSums {
            logits,
            greatest,
            inverse_temperature: distribution.inverse_temperature_in_f32(),
            sums: &mut distribution.blocks,
        });
        distribution.total = distribution.blocks.iter().sum();
        Some(distribution)
    }

    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.logits.len()
    }

    /// Returns the sum of all weights.
    pub(crate) fn total(&self) -> f64 {
        self.total
    }

    /// Returns the logits.
    pub(crate) fn logits(&self) -> &[f32] {
        self.logits
    }

    /// Returns `exp((logit - max logit) / temperature)`, which is 1 for the most likely token.
    pub(crate) fn weight_of(&self, logit: f32) -> f64 {
        ((f64::from(logit) - self.greatest) * self.inverse_temperature).exp()
    }

    /// Returns the logit for a weight.
    pub(crate) fn logit_of(&self, weight: f64) -> f64 {
        self.greatest + weight.ln() / self.inverse_temperature
    }

    /// Returns the first token with a cumulative probability above `u` (inverse transform
    /// sampling).
    pub(crate) fn quantile(&self, u: f64) -> u32 {
        let threshold = u * self.total;
        let mut before = 0.;
        let mut last = 0;
        for (block, &sum) in self.blocks.iter().enumerate() {
            if sum > 0. {
                last = block;
                if before + sum > threshold {
                    break;
                }
                before += sum;
            }
        }
        let first = last * BLOCK;
        let block = &self.logits[first..self.len().min(first + BLOCK)];
        let weights = block.iter().map(|&x| self.weight_of(x));
        (first + position_above(weights, threshold - before)) as u32
    }

    /// Returns the most likely token; the first if several tie.
    pub(crate) fn mode(&self) -> u32 {
        let greatest = |x: &f32| f64::from(*x) == self.greatest;
        self.logits.iter().position(greatest).unwrap_or(0) as u32
    }

    /// Returns the log-probability of `token`, with the same arithmetic as
    /// [`log_prob`](crate::log_prob).
    pub(crate) fn log_prob(&self, token: u32) -> f32 {
        let inverse_temperature = self.inverse_temperature_in_f32();
        let sums = vectors().dispatch(ForwardRow {
            logits: self.logits,
            inverse_temperature,
            sums: Sums::default(),
        });
        let logit = f64::from(self.logits[token as usize]);
        sums.finish(logit, inverse_temperature)[0]
    }

    /// Finite, so that its product with the most likely token is finite.
    fn inverse_temperature_in_f32(&self) -> f32 {
        (self.inverse_temperature as f32).min(f32::MAX)
    }
}

/// Appends each block's weight sum to `sums`. The terms are f32.
struct BlockSums<'a> {
    logits: &'a [f32],
    greatest: f32,
    inverse_temperature: f32,
    sums: &'a mut Vec<f64>,
}

impl WithSimd for BlockSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let greatest = simd.splat_f32s(self.greatest);
        let scale = simd.splat_f32s(self.inverse_temperature);
        let mut padded = [f32::NEG_INFINITY; BLOCK];
        for block in self.logits.chunks(BLOCK) {
            let block = match block.len() {
                BLOCK => block,
                len => {
                    padded[..len].copy_from_slice(block);
                    &padded
                }
            };
            let mut sums = LaneSums::<S>::zeros(simd);
            for x in S::as_simd_f32s(block).0.chunks_exact(LaneSums::<S>::PARTS) {
                for part in 0..LaneSums::<S>::PARTS {
                    let d = simd.mul_f32s(simd.sub_f32s(x[part], greatest), scale);
                    let d = at_least(simd, d, EXP_UNDERFLOW - 1.0);
                    sums.parts[part] = simd.add_f32s(sums.parts[part], exp(simd, d));
                }
            }
            self.sums.push(f64::from(sums.total(simd)));
        }
    }
}

/// Returns the first index where the cumulative sum exceeds `threshold`.
///
/// If rounding keeps the sum below it, returns the last nonzero index.
pub(crate) fn position_above(weights: impl Iterator<Item = f64>, threshold: f64) -> usize {
    let mut cumulative = 0.;
    let mut last = 0;
    for (position, weight) in weights.enumerate() {
        if weight > 0. {
            cumulative += weight;
            last = position;
            if cumulative > threshold {
                break;
            }
        }
    }
    last
}
