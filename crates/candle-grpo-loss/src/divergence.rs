//! The binary divergence between two policies on the sampled token.

use candle_core::{Result, Tensor};

/// Probability bounds in [`binary_kl`], which keep its logarithms finite.
const PROBABILITY_MIN: f64 = 1e-6;
const PROBABILITY_MAX: f64 = 1. - PROBABILITY_MIN;

/// Clamps probabilities to `[1e-6, 1 - 1e-6]`.
pub(crate) fn clamped_probability(p: &Tensor) -> Result<Tensor> {
    p.clamp(PROBABILITY_MIN, PROBABILITY_MAX)
}

/// Computes `p log(p / q) + (1 - p) log((1 - p) / (1 - q))`, the KL between two Bernoulli
/// distributions.
///
/// Both probabilities are clamped to `[1e-6, 1 - 1e-6]`.
pub(crate) fn binary_kl(p: &Tensor, q: &Tensor) -> Result<Tensor> {
    let (p, q) = (clamped_probability(p)?, clamped_probability(q)?);
    let complement = |x: &Tensor| -> Result<Tensor> { x.neg()? + 1. };
    let sampled = (&p * (p.log()? - q.log()?)?)?;
    let others = (complement(&p)? * (complement(&p)?.log()? - complement(&q)?.log()?)?)?;
    sampled + others
}
