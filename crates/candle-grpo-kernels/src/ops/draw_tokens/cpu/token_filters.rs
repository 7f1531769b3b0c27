//! Top-k, top-p and min-p.

use std::cmp::Ordering;

use super::DrawOptions;
use super::distribution::{Distribution, position_above};

/// The tokens in a [`Distribution`] that the filters in [`DrawOptions`] keep.
pub(crate) struct FilteredDistribution {
    /// Tokens and their weights, the most likely first.
    kept: Vec<(u32, f64)>,
    total: f64,
}

impl FilteredDistribution {
    /// Keeps at least one token, the most likely.
    pub(crate) fn new(distribution: &Distribution, options: &DrawOptions) -> Self {
        let &DrawOptions {
            top_k,
            top_p,
            min_p,
            ..
        } = options;
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
        // Tokens so unlikely that even all together they do not matter for top_p.
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

    /// The token where the cumulative distribution reaches `u`, and its log-probability.
    pub(crate) fn quantile(&self, u: f64) -> (u32, f32) {
        let weights = self.kept.iter().map(|(_, weight)| *weight);
        let (token, weight) = self.kept[position_above(weights, u * self.total)];
        (token, (weight / self.total).ln() as f32)
    }
}
