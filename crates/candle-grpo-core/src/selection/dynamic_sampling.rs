//! Whether a step has enough groups that teach something.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// The figures of one group on the host, from [`crate::GroupStatistics::to_host`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupSummary {
    /// The mean reward.
    pub mean: f64,
    /// The standard deviation.
    pub std: f64,
    /// How many samples have a reward.
    pub count: usize,
    /// Whether all rewards are equal.
    pub zero_variance: bool,
}

/// Which groups are trained on. Each bound is strict: what equals it is dropped.
///
/// Take the figures of a group from its scores before any shaping: a penalty for length gives a spread to a group whose
/// answers are all right, or all wrong.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupFilter {
    /// Whether the rewards of a group must differ, as DAPO has it (<https://arxiv.org/abs/2503.14476>).
    pub spread: bool,
    /// The standard deviation must be above this (ROLL's `std_filter`).
    pub std_above: Option<f64>,
    /// The mean must be above this (ROLL's `mean_filter`, OpenRLHF's `dynamic_filtering`).
    pub mean_above: Option<f64>,
    /// The mean must be below this.
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
    /// Checks the bounds; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        for (name, bound) in [
            ("std_above", self.std_above),
            ("mean_above", self.mean_above),
            ("mean_below", self.mean_below),
        ] {
            if let Some(bound) = bound
                && bound.is_nan()
            {
                bail!("group_filter.{name}: NaN, must be a number");
            }
        }
        if let (Some(above), Some(below)) = (self.mean_above, self.mean_below)
            && above >= below
        {
            bail!("group_filter: mean_above {above} is not below mean_below {below}");
        }
        Ok(())
    }

    /// Whether the group is trained on.
    pub fn keeps(&self, group: &GroupSummary) -> bool {
        !(self.spread && group.zero_variance)
            && self.std_above.is_none_or(|bound| group.std > bound)
            && self.mean_above.is_none_or(|bound| group.mean > bound)
            && self.mean_below.is_none_or(|bound| group.mean < bound)
    }
}

/// Sampling until a step has enough groups that teach something (DAPO's dynamic sampling,
/// <https://arxiv.org/abs/2503.14476>).
///
/// Dropped groups leave the denominators of the loss, so fill the step or count them in its totals.
///
/// ```
/// use candle_grpo_core::{DynamicSampling, GroupAdvantage, SamplingDecision};
///
/// let sampling = DynamicSampling { groups: 2, max_batches: Some(3), ..Default::default() };
/// let statistics = GroupAdvantage::grpo().group_statistics(&[0., 1., 1., 1.], 2)?;
///
/// let kept = sampling.keep(&statistics.to_host()?);
/// assert_eq!(kept, [0]); // the second group is all right
/// assert_eq!(sampling.decide(kept.len(), 1)?, SamplingDecision::Sample { missing: 1 });
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSampling {
    /// How many groups a step needs.
    pub groups: usize,
    /// How many batches are sampled for one step at most; absent: as many as it takes.
    pub max_batches: Option<usize>,
    /// Which groups count.
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

/// What comes next in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplingDecision {
    /// There are enough groups.
    Train,
    /// So many groups are missing: sample another batch.
    Sample {
        /// How many.
        missing: usize,
    },
    /// So many groups are missing, and no further batch is allowed.
    GiveUp {
        /// How many.
        missing: usize,
    },
}

impl DynamicSampling {
    /// The indices of the groups that are kept.
    pub fn keep(&self, groups: &[GroupSummary]) -> Vec<usize> {
        let kept = |i: &usize| self.filter.keeps(&groups[*i]);
        (0..groups.len()).filter(kept).collect()
    }

    /// What to do with `kept` groups after `batches` batches of this step.
    pub fn decide(&self, kept: usize, batches: usize) -> Result<SamplingDecision> {
        if self.groups == 0 || self.max_batches == Some(0) {
            bail!(
                "groups: {} and max_batches: {:?}, must be at least 1",
                self.groups,
                self.max_batches
            );
        }
        self.filter.validate()?;
        Ok(match self.groups.saturating_sub(kept) {
            0 => SamplingDecision::Train,
            missing if self.max_batches.is_some_and(|max| batches >= max) => {
                SamplingDecision::GiveUp { missing }
            }
            missing => SamplingDecision::Sample { missing },
        })
    }
}
