//! Corrections under verl's names.

use super::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutCorrection, RolloutFilter};
use crate::importance_level::ImportanceLevel;

/// Constructors named after verl's presets. `max` bounds a weight. A `range` bounds a whole
/// sequence's ratio or, with `geo`, its geometric mean.
///
/// verl's `decoupled` presets recompute the old policy. Its `bypass` presets use the sampler's
/// log-probs as the old ones. For those, pass [`crate::OldPolicy::Rollout`], and call
/// [`RolloutCorrection::compute`] with the policy's log-probs as `old_log_probs`.
impl RolloutCorrection {
    /// Weights each token, by at most `max` (`decoupled_token_is`).
    pub fn token_is(max: f64) -> Self {
        Self::default().weighted(ImportanceWeight::truncated(max))
    }

    /// Weights each sequence, by at most `max` (`decoupled_seq_is`).
    pub fn seq_is(max: f64) -> Self {
        Self::default().weighted(of_sequence(max))
    }

    /// Weights each sequence, and keeps only sequences with a ratio in `range`
    /// (`decoupled_seq_is_rs`).
    pub fn seq_is_rs(max: f64, range: [f64; 2]) -> Self {
        let level = FilterLevel::SequenceSum;
        Self::seq_is(max).filtered(ratio_between(level, range))
    }

    /// Keeps only sequences whose geometric mean ratio is in `range` (`decoupled_geo_rs`).
    pub fn geo_rs(range: [f64; 2]) -> Self {
        Self::default().filtered(ratio_between(FilterLevel::SequenceMean, range))
    }

    /// [`Self::geo_rs`], with a weight for each token (`decoupled_geo_rs_token_tis`).
    pub fn geo_rs_token_tis(max: f64, range: [f64; 2]) -> Self {
        Self::geo_rs(range).weighted(ImportanceWeight::truncated(max))
    }

    /// Keeps only sequences whose mean k3 is at most `max_k3` (`decoupled_k3_rs`).
    pub fn k3_rs(max_k3: f64) -> Self {
        Self::default().filtered(RolloutFilter {
            statistic: FilterStatistic::K3,
            level: FilterLevel::SequenceMean,
            min: None,
            max: Some(max_k3),
        })
    }

    /// [`Self::k3_rs`], with a weight for each sequence (`decoupled_k3_rs_seq_tis`).
    pub fn k3_rs_seq_tis(max: f64, max_k3: f64) -> Self {
        Self::k3_rs(max_k3).weighted(of_sequence(max))
    }

    /// Weights each token, with 0 outside `range` (`decoupled_token_icepop`).
    pub fn token_icepop([min, max]: [f64; 2]) -> Self {
        Self::default().weighted(ImportanceWeight::icepop(min, max))
    }

    /// Keeps tokens so that the log-ratio's second moment stays below `second_moment` (M2PO,
    /// <https://arxiv.org/abs/2510.01161>; the paper uses 0.04).
    pub fn m2po(second_moment: f64) -> Self {
        Self {
            second_moment: Some(second_moment),
            ..Self::default()
        }
    }

    fn weighted(self, weight: ImportanceWeight) -> Self {
        Self {
            weight: Some(weight),
            ..self
        }
    }

    fn filtered(mut self, filter: RolloutFilter) -> Self {
        self.filters.push(filter);
        self
    }
}

fn of_sequence(max: f64) -> ImportanceWeight {
    ImportanceWeight {
        level: ImportanceLevel::SequenceProduct,
        ..ImportanceWeight::truncated(max)
    }
}

fn ratio_between(level: FilterLevel, [min, max]: [f64; 2]) -> RolloutFilter {
    RolloutFilter {
        statistic: FilterStatistic::LogRatio,
        level,
        min: Some(min.ln()),
        max: Some(max.ln()),
    }
}
