//! Dynamic sampling: groups without a learning signal are replaced.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// One group's statistics on the host, from [`crate::advantage::GroupStatistics::summaries`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupSummary {
    /// Mean reward.
    pub mean: f64,
    /// Standard deviation.
    pub std: f64,
    /// Number of samples that have a reward.
    pub count: usize,
    /// True if all rewards are equal.
    pub zero_variance: bool,
}

/// A group filter. All bounds are strict.
///
/// Compute the statistics from scores before any shaping. A length penalty makes rewards differ
/// even in a group whose answers are all right or all wrong.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupFilter {
    /// Requires that a group's rewards differ (DAPO, <https://arxiv.org/abs/2503.14476>). Default
    /// `true`.
    pub spread: bool,
    /// Lower bound for the standard deviation (ROLL's `std_filter`). Absent by default.
    pub std_above: Option<f64>,
    /// Lower bound for the mean (ROLL's `mean_filter`, OpenRLHF's `dynamic_filtering`). Absent by
    /// default.
    pub mean_above: Option<f64>,
    /// Upper bound for the mean. Absent by default.
    pub mean_below: Option<f64>,
}

impl Default for GroupFilter {
    fn default() -> Self {
        Self {
            spread: true,
            std_above: None,
            mean_above: None,
            mean_below: None,
        }
    }
}

impl GroupFilter {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        for (field, bound) in [
            ("std_above", self.std_above),
            ("mean_above", self.mean_above),
            ("mean_below", self.mean_below),
        ] {
            let valid = bound.is_none_or(|bound| !bound.is_nan());
            validate::check(valid, field, "NaN", "be a number")?;
        }
        if let (Some(above), Some(below)) = (self.mean_above, self.mean_below) {
            let must = format!("be below mean_below, {below}");
            validate::check(above < below, "mean_above", above, &must)?;
        }
        Ok(())
    }

    /// Returns whether the filter keeps the group.
    pub fn keeps(&self, group: &GroupSummary) -> bool {
        !(self.spread && group.zero_variance)
            && self.std_above.is_none_or(|bound| group.std > bound)
            && self.mean_above.is_none_or(|bound| group.mean > bound)
            && self.mean_below.is_none_or(|bound| group.mean < bound)
    }
}

/// Dynamic sampling: samples until a step has enough groups with a learning signal (DAPO,
/// <https://arxiv.org/abs/2503.14476>).
///
/// Use it if many groups are all right or all wrong. It costs generation time: another batch is
/// sampled while groups are missing.
///
/// Dropped groups also leave the loss denominators. Either fill the step, or count the dropped
/// groups in its totals.
///
/// ```
/// use candle_grpo_core::selection::{DynamicSampling, SamplingDecision};
/// use candle_grpo_core::GroupAdvantage;
///
/// let sampling = DynamicSampling { groups: 2, max_batches: Some(3), ..Default::default() };
/// let statistics = GroupAdvantage::grpo().group_statistics(&[0., 1., 1., 1.], 2)?;
///
/// let kept = sampling.keep(&statistics.summaries()?);
/// assert_eq!(kept, [0]); // all rewards of the second group are 1
/// assert_eq!(sampling.decide(kept.len(), 1)?, SamplingDecision::Sample { missing: 1 });
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSampling {
    /// Number of groups per step. Default 1.
    pub groups: usize,
    /// Maximum number of batches sampled for one step. If absent, there is no limit. Default 10.
    pub max_batches: Option<usize>,
    /// Group filter. Default [`GroupFilter::default`].
    pub filter: GroupFilter,
}

impl Default for DynamicSampling {
    fn default() -> Self {
        Self {
            groups: 1,
            max_batches: Some(10),
            filter: GroupFilter::default(),
        }
    }
}

/// Next action in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplingDecision {
    /// Train: there are enough groups.
    Train,
    /// Sample another batch.
    Sample {
        /// Number of missing groups.
        missing: usize,
    },
    /// Stop sampling: the batch limit is reached.
    GiveUp {
        /// Number of missing groups.
        missing: usize,
    },
}

impl DynamicSampling {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::at_least_one("groups", self.groups)?;
        validate::at_least_one("max_batches", self.max_batches.unwrap_or(1))?;
        self.filter.validate().map_err(|e| e.within("filter"))
    }

    /// Returns the indices of groups that the filter keeps.
    pub fn keep(&self, groups: &[GroupSummary]) -> Vec<usize> {
        let kept = |i: &usize| self.filter.keeps(&groups[*i]);
        (0..groups.len()).filter(kept).collect()
    }

    /// Decides what to do after `batches` batches in this step gave `kept` groups.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn decide(&self, kept: usize, batches: usize) -> Result<SamplingDecision> {
        self.validate()?;
        Ok(match self.groups.saturating_sub(kept) {
            0 => SamplingDecision::Train,
            missing if self.max_batches.is_some_and(|max| batches >= max) => {
                SamplingDecision::GiveUp { missing }
            }
            missing => SamplingDecision::Sample { missing },
        })
    }
}
