//! Options of [`GroupAdvantage`](super::GroupAdvantage).

use serde::{Deserialize, Serialize};

/// Epsilon that is added to a divisor by default: 1e-6.
///
/// It is the default of [`GroupAdvantage`](super::GroupAdvantage) and of
/// [`RewardNorm`](crate::rewards::RewardNorm). So a change moves each estimator that divides by a
/// standard deviation or a mean: GRPO, Lite PPO, MaxRL, pass@k,
/// [`Gigpo`](crate::trajectories::Gigpo) and every [`Scale`] but [`Scale::None`]. GDPO, the
/// recipes of other libraries and [`Whitening`](super::Whitening) have epsilons of their own.
pub const DEFAULT_EPSILON: f64 = 1e-6;

/// Baseline that is subtracted from a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Baseline {
    /// Mean of the sample's group (GRPO, <https://arxiv.org/abs/2402.03300>). The default.
    #[default]
    GroupMean,
    /// Mean of the other samples of the group (RLOO, <https://arxiv.org/abs/2402.14740>).
    LeaveOneOut,
    /// Mean of the group weighted by the number of tokens (OPO, <https://arxiv.org/abs/2505.23585>).
    /// Needs a response mask.
    LengthWeighted,
    /// Pass@k baseline (<https://arxiv.org/abs/2503.19595>): the best sample of a group gets its
    /// margin over the second best, all others get 0. Two best samples get 0.
    BestOfOthers,
    /// Mean of the batch (OpenRLHF's `flash_reinforce`).
    BatchMean,
    /// `reward_baselines` of the batch, such as the rewards of greedy completions (ReMax,
    /// <https://arxiv.org/abs/2310.10505>).
    Given,
    /// 0.
    None,
}

impl Baseline {
    /// Returns whether the baseline is a statistic of the group, so that it needs at least two
    /// samples.
    pub fn is_group_relative(self) -> bool {
        match self {
            Self::GroupMean | Self::LeaveOneOut | Self::LengthWeighted | Self::BestOfOthers => true,
            Self::BatchMean | Self::Given | Self::None => false,
        }
    }
}

/// Divisor of the reward minus its baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// Standard deviation of the group's rewards. Needs a baseline of the group. The default.
    #[default]
    Group,
    /// Standard deviation of all rewards of the batch (<https://arxiv.org/abs/2508.08221>).
    Batch,
    /// Mean reward of the group, for rewards that are not negative (MaxRL, as in SkyRL and
    /// prime-rl). Needs a baseline of the group. A group whose mean is not positive gets 0.
    GroupMean,
    /// 1 (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    None,
}

/// Order of summation and normalization for rewards of several components.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ComponentOrder {
    /// Sums the weighted components, then normalizes the sum. The default.
    #[default]
    SumThenNormalize,
    /// Normalizes each component, then sums the weighted results, so that a component of large
    /// variance does not hide the others (GDPO, <https://arxiv.org/abs/2601.05242>).
    NormalizeThenSum,
}

/// Samples that enter means and standard deviations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BaselinePopulation {
    /// All samples, including those that a filter excludes from the loss. The default.
    #[default]
    All,
    /// Samples with a token in the response mask. The others get the advantage 0. Needs a response
    /// mask.
    Unmasked,
}

/// Factor that compensates for samples without a learning signal:
/// `B / (number of samples with a signal)` (GPG, <https://arxiv.org/abs/2504.02546>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ZeroSignalScaling {
    /// No compensation: the factor is 1. The default.
    #[default]
    None,
    /// Samples of groups whose rewards differ have a signal, as in the paper.
    GroupsWithSpread,
    /// Samples whose reward is not 0 have a signal, as in verl. For rewards of 1 and -1 the factor
    /// is always 1.
    NonZeroRewards,
}

/// Advantage of a sample that is alone in its group, where a baseline of the group is undefined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SingletonGroup {
    /// An error that names the group. The default.
    #[default]
    Error,
    /// 0 (TRL).
    Zero,
    /// The reward (verl, twinkle).
    Raw,
    /// The reward minus the mean of the batch. [`Scale::Batch`] divides it by the standard
    /// deviation of the batch.
    BatchMean,
}
