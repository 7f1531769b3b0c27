//! Sampling of one token from one row of logits.

use anyhow::{Result, ensure};

use crate::NotFinite;

/// Number of tokens per block with a cached sum.
const BLOCK: usize = 512;

/// Unnormalized softmax(logits / temperature) in f64.
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    greatest: f64,
    inverse_temperature: f64,
    /// Sums of the weights per block of [`BLOCK`] tokens.
    blocks: Vec<f64>,
    total: f64,
}

impl<'a> Distribution<'a> {
    /// Computes the weights of a row.
    ///
    /// # Errors
    ///
    /// Returns an error if a logit is NaN or +inf, or all are -inf.
    pub(crate) fn new(logits: &'a [f32], temperature: f64) -> Result<Self> {
        if let Some(token) = logits
            .iter()
            .position(|x| x.is_nan() || *x == f32::INFINITY)
        {
            let logit = format!("the logit of token {token} ({})", logits[token]);
            return Err(NotFinite::with_consequence(logit, "no token can be drawn").into());
        }
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        ensure!(
            greatest > f32::NEG_INFINITY,
            "no token has a logit above -inf"
        );
        let mut distribution = Self {
            logits,
            greatest: f64::from(greatest),
            inverse_temperature: 1. / temperature,
            blocks: Vec::with_capacity(logits.len().div_ceil(BLOCK)),
            total: 0.,
        };
        for block in logits.chunks(BLOCK) {
            let sum = block.iter().map(|&x| distribution.weight_of(x)).sum();
            distribution.blocks.push(sum);
        }
        distribution.total = distribution.blocks.iter().sum();
        Ok(distribution)
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

    /// Returns the logit of a weight.
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

    /// Returns the most likely token, the first of equals.
    pub(crate) fn mode(&self) -> u32 {
        let greatest = |x: &f32| f64::from(*x) == self.greatest;
        self.logits.iter().position(greatest).unwrap_or(0) as u32
    }

    /// Returns the log-probability of `token`.
    pub(crate) fn log_prob(&self, token: u32) -> f32 {
        let logit = f64::from(self.logits[token as usize]);
        ((logit - self.greatest) * self.inverse_temperature - self.total.ln()) as f32
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{generator, uniform};

    /// 99.9 % quantile of chi-square with 7 degrees of freedom.
    const CRITICAL_7: f64 = 24.32;

    #[test]
    fn frequencies_are_the_probabilities_in_the_tails_too() {
        // From 0.83 down to 2e-5.
        let logits: [f32; 8] = [4.0, 1.0, -6.5, 2.0, -3.0, 0.0, -1.0, -5.0];
        for temperature in [1.0, 0.7, 2.5] {
            let distribution = Distribution::new(&logits, temperature).unwrap();
            let n = 2_000_000;
            let mut counts = [0u32; 8];
            let mut rng = generator(5, 1, 2, 3);
            for _ in 0..n {
                counts[distribution.quantile(uniform(&mut rng)) as usize] += 1;
            }
            let mut chi_square = 0.;
            for (token, &count) in counts.iter().enumerate() {
                let expected = f64::from(distribution.log_prob(token as u32)).exp() * f64::from(n);
                chi_square += (f64::from(count) - expected).powi(2) / expected;
            }
            assert!(
                chi_square < CRITICAL_7,
                "temperature {temperature}: {counts:?}, {chi_square}"
            );
        }
    }

    #[test]
    fn all_blocks_are_drawn_from_as_often_as_they_weigh() {
        let logits: Vec<f32> = (0..3 * BLOCK + 7)
            .map(|i| (i as f32 * 0.37).sin() * 3.)
            .collect();
        let distribution = Distribution::new(&logits, 0.8).unwrap();
        let n = 1_000_000;
        let mut counts = vec![0u32; logits.len()];
        let mut rng = generator(8, 1, 2, 3);
        for _ in 0..n {
            counts[distribution.quantile(uniform(&mut rng)) as usize] += 1;
        }
        let chi_square: f64 = counts
            .iter()
            .enumerate()
            .map(|(token, &count)| {
                let expected = f64::from(distribution.log_prob(token as u32)).exp() * f64::from(n);
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        // 1542 degrees of freedom: the 99.9 % quantile is about 1542 + 3.09 sqrt(2 * 1542) + 6.
        assert!(chi_square < 1720., "{chi_square}");
    }

    #[test]
    fn impossible_tokens_are_never_drawn() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        let distribution = Distribution::new(&logits, 1.).unwrap();
        for u in [0., 0.5, 1. - f64::EPSILON / 2.] {
            assert_eq!(distribution.quantile(u), 1);
        }
        assert_eq!(distribution.log_prob(1), 0.);
        assert_eq!(distribution.mode(), 1);
    }

    #[test]
    fn bad_logits_are_errors() {
        for (logits, words) in [
            (
                [0.0, f32::NAN],
                "the logit of token 1 (NaN): not finite, no token can be drawn",
            ),
            (
                [f32::INFINITY, 0.0],
                "the logit of token 0 (inf): not finite, no token can be drawn",
            ),
            ([f32::NEG_INFINITY; 2], "no token has a logit above -inf"),
        ] {
            let error = Distribution::new(&logits, 1.).err().unwrap().to_string();
            assert_eq!(error, words);
        }
    }
}
