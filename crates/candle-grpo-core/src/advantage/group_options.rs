//! Options for [`GroupAdvantage`](super::GroupAdvantage).

use serde::{Deserialize, Serialize};

/// Default epsilon in a divisor: 1e-6.
///
/// [`GroupAdvantage`](super::GroupAdvantage) and [`RewardNorm`](crate::rewards::RewardNorm) default
/// to it. Changing it therefore changes each estimator that divides by a standard deviation or a
/// mean: GRPO, Lite PPO, MaxRL, pass@k, [`Gigpo`](crate::trajectories::Gigpo) and every [`Scale`]
/// but [`Scale::None`]. GDPO, other libraries' recipes and [`Whitening`](super::Whitening) have
/// their own epsilons.
pub const DEFAULT_EPSILON: f64 = 1e-6;

/// Baseline that is subtracted from a reward.
///
/// `GroupMean` is a safe first choice. `LeaveOneOut` is unbiased, which matters most for small
/// groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Baseline {
    /// Group mean (GRPO, <https://arxiv.org/abs/2402.03300>). The default.
    #[default]
    GroupMean,
    /// Mean over the other samples in the group (RLOO, <https://arxiv.org/abs/2402.14740>).
    LeaveOneOut,
    /// Group mean, weighted by token count (OPO, <https://arxiv.org/abs/2505.23585>). Needs a
    /// response mask.
    LengthWeighted,
    /// Pass@k baseline (<https://arxiv.org/abs/2503.19595>). A group's best sample gets its margin
    /// over the second best, and all others get 0. If two samples tie for the best, both get 0.
    BestOfOthers,
    /// Batch mean (OpenRLHF's `flash_reinforce`).
    BatchMean,
    /// The batch's `reward_baselines`, such as the rewards of greedy completions (ReMax,
    /// <https://arxiv.org/abs/2310.10505>).
    Given,
    /// 0.
    None,
}

impl Baseline {
    /// Returns whether the baseline is a group statistic, which needs at least two samples.
    pub fn is_group_relative(self) -> bool {
        match self {
            Self::GroupMean | Self::LeaveOneOut | Self::LengthWeighted | Self::BestOfOthers => true,
            Self::BatchMean | Self::Given | Self::None => false,
        }
    }
}

/// Divisor for the reward minus its baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// Standard deviation within the group. Needs a group baseline. The default.
    #[default]
    Group,
    /// Standard deviation over the whole batch (<https://arxiv.org/abs/2508.08221>).
    Batch,
    /// Group mean, for nonnegative rewards (MaxRL, as in SkyRL and prime-rl). Needs a group
    /// baseline. If the mean is not positive, the group gets 0.
    GroupMean,
    /// 1 (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    None,
}

/// Order in which reward components are summed and normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ComponentOrder {
    /// Sums the weighted components, then normalizes the sum. The default.
    #[default]
    SumThenNormalize,
    /// Normalizes each component, then sums the weighted results. A component with a large variance
    /// then does not hide the others (GDPO, <https://arxiv.org/abs/2601.05242>).
    NormalizeThenSum,
}

/// Samples that enter means and standard deviations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BaselinePopulation {
    /// All samples, including samples that a filter excludes from the loss. The default.
    #[default]
    All,
    /// Samples with at least one token in the response mask. The others get advantage 0. Needs a
    /// response mask.
    Unmasked,
}

/// Factor that compensates for samples without a learning signal:
/// `B / (number of samples with a signal)` (GPG, <https://arxiv.org/abs/2504.02546>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ZeroSignalScaling {
    /// No compensation: the factor is 1. The default.
    #[default]
    None,
    /// A sample has a signal if the rewards in its group differ, as in the paper.
    GroupsWithSpread,
    /// A sample has a signal if its reward is not 0, as in verl. If rewards are 1 and -1, the
    /// factor is always 1.
    NonZeroRewards,
}

/// Advantage for a sample that is alone in its group, where a group baseline is undefined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// The reward minus the batch mean. [`Scale::Batch`] divides it by the batch's standard
    /// deviation.
    BatchMean,
}
