//! Top-k, top-p and min-p.

use std::cmp::Ordering;

use anyhow::Result;
use candle_grpo_core::validate;

use super::categorical::{Distribution, position_above};

/// The filters of transformers, in its order: the `top_k` most likely tokens, of these the most
/// likely ones with a total probability of `top_p`, of these the ones with at least `min_p` times
/// the greatest probability. vLLM differs in one case: with both `min_p` and `top_p` it applies
/// `min_p` first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LogitFilters {
    pub(crate) top_k: usize,
    pub(crate) top_p: f64,
    pub(crate) min_p: f64,
}

impl LogitFilters {
    /// Fails if a field is out of range.
    pub(crate) fn validate(&self) -> Result<()> {
        validate::share("top_p", self.top_p)?;
        Ok(validate::unit_interval("min_p", self.min_p)?)
    }

    /// True if all tokens may be drawn.
    pub(crate) fn is_off(&self) -> bool {
        self.top_k == 0 && self.top_p == 1. && self.min_p == 0.
    }
}

/// The tokens of a [`Distribution`] that [`LogitFilters`] keep.
pub(crate) struct FilteredDistribution {
    /// Tokens and their weights, the most likely first.
    kept: Vec<(u32, f64)>,
    total: f64,
}

impl FilteredDistribution {
    /// Keeps at least one token, the most likely.
    pub(crate) fn new(distribution: &Distribution, filters: LogitFilters) -> Self {
        let LogitFilters {
            top_k,
            top_p,
            min_p,
        } = filters;
        let logits = distribution.logits();
        let mut lowest = f32::NEG_INFINITY;
        let mut total = distribution.total();
        if (1..logits.len()).contains(&top_k) {
            let mut sorted = logits.to_vec();
            let (_, kth, _) = sorted.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
            lowest = *kth;
            total = logits
                .iter()
                .filter(|x| **x >= lowest)
                .map(|&x| distribution.weight_of(x))
                .sum();
        }
        // Tokens so unlikely that all of them together are not needed for top_p.
        let unneeded = (1. - top_p) * total / logits.len() as f64;
        let floor = distribution.logit_of(unneeded.max(min_p)) - 1e-3;
        let mut kept: Vec<(u32, f64)> = (0u32..)
            .zip(logits)
            .filter(|(_, x)| **x >= lowest && f64::from(**x) >= floor)
            .map(|(token, &x)| (token, distribution.weight_of(x)))
            .filter(|(_, weight)| *weight > 0. && *weight >= min_p)
            .collect();
        kept.sort_unstable_by(|a, b| match b.1.total_cmp(&a.1) {
            Ordering::Equal => a.0.cmp(&b.0),
            order => order,
        });
        if top_p < 1. {
            let mut before = 0.;
            let enough = kept.iter().position(|(_, weight)| {
                let enough = before >= top_p * total;
                before += weight;
                enough
            });
            kept.truncate(enough.unwrap_or(kept.len()));
        }
        let total = kept.iter().map(|(_, weight)| weight).sum();
        Self { kept, total }
    }

    /// The token at `u` of the distribution function, and its log-probability.
    pub(crate) fn quantile(&self, u: f64) -> (u32, f32) {
        let weights = self.kept.iter().map(|(_, weight)| *weight);
        let (token, weight) = self.kept[position_above(weights, u * self.total)];
        (token, (weight / self.total).ln() as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{generator, uniform};
    use rstest::rstest;

    const OFF: LogitFilters = LogitFilters {
        top_k: 0,
        top_p: 1.,
        min_p: 0.,
    };

    /// 1 and the logarithms of 0.4, 0.1, 0.3, 0.15, 0.05.
    const LOGITS: [f32; 5] = [
        0.083_709_27,
        -1.302_585_1,
        -0.203_972_8,
        -0.897_12,
        -1.995_732_3,
    ];

    fn tokens(logits: &[f32], filters: LogitFilters) -> Vec<u32> {
        let distribution = Distribution::new(logits, 1.).unwrap();
        let truncated = FilteredDistribution::new(&distribution, filters);
        truncated.kept.iter().map(|(token, _)| *token).collect()
    }

    #[rstest]
    #[case(OFF, &[0, 2, 3, 1, 4])]
    #[case(LogitFilters { top_k: 2, ..OFF }, &[0, 2])]
    #[case(LogitFilters { top_k: 9, ..OFF }, &[0, 2, 3, 1, 4])]
    #[case(LogitFilters { top_p: 0.69, ..OFF }, &[0, 2])]
    #[case(LogitFilters { top_p: 0.71, ..OFF }, &[0, 2, 3])]
    #[case(LogitFilters { top_p: 1e-9, ..OFF }, &[0])]
    #[case(LogitFilters { min_p: 0.36, ..OFF }, &[0, 2, 3])]
    #[case(LogitFilters { min_p: 1., ..OFF }, &[0])]
    // 0.4 and 0.3 are 0.82 of what top_k leaves.
    #[case(LogitFilters { top_k: 3, top_p: 0.82, ..OFF }, &[0, 2])]
    #[case(LogitFilters { top_k: 3, top_p: 0.83, ..OFF }, &[0, 2, 3])]
    #[case(LogitFilters { top_k: 3, top_p: 0.83, min_p: 0.5 }, &[0, 2])]
    // transformers: 0.4, 0.3 and 0.15 are the first to reach 0.8; vLLM would stop at 0.4 + 0.3 of
    // 0.85.
    #[case(LogitFilters { top_p: 0.8, min_p: 0.3, ..OFF }, &[0, 2, 3])]
    fn the_tokens_are_those_of_the_definitions(
        #[case] filters: LogitFilters,
        #[case] expected: &[u32],
    ) {
        assert_eq!(tokens(&LOGITS, filters), expected);
    }

    #[test]
    fn ties_at_the_kth_are_kept_and_equals_are_taken_in_order() {
        let logits = [1f32, 2., 1., 1., f32::NEG_INFINITY];
        assert_eq!(
            tokens(&logits, LogitFilters { top_k: 2, ..OFF }),
            [1, 0, 2, 3]
        );
        assert_eq!(tokens(&logits, LogitFilters { top_p: 0.6, ..OFF }), [1, 0]);
        assert_eq!(tokens(&logits, OFF), [1, 0, 2, 3]);
    }

    #[test]
    fn frequencies_are_the_renormalized_probabilities() {
        /// 99.9 % quantile of chi-square with 2 degrees of freedom.
        const CRITICAL_2: f64 = 13.82;
        let distribution = Distribution::new(&LOGITS, 1.).unwrap();
        let truncated = FilteredDistribution::new(&distribution, LogitFilters { top_k: 3, ..OFF });
        let (n, mut rng) = (1_000_000, generator(5, 1, 2, 3));
        let mut counts = [0f64; 5];
        for _ in 0..n {
            let (token, log_prob) = truncated.quantile(uniform(&mut rng));
            counts[token as usize] += 1.;
            let p = [0.4f32, 0., 0.3, 0.15, 0.][token as usize] / 0.85;
            assert!((log_prob - p.ln()).abs() < 1e-6);
        }
        assert_eq!((counts[1], counts[4]), (0., 0.));
        let chi_square: f64 = [(0, 0.4), (2, 0.3), (3, 0.15)]
            .map(|(token, p): (usize, f64)| {
                let expected = p / 0.85 * f64::from(n);
                (counts[token] - expected).powi(2) / expected
            })
            .iter()
            .sum();
        assert!(chi_square < CRITICAL_2, "{counts:?}, {chi_square}");
    }
}
