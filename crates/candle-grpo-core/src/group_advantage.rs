//! Advantages relative to the group: GRPO and leave-one-out.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::groups::{GroupLayout, Groups};
use crate::moments::{Moments, divide_by_std};
use crate::rewards::{IntoRewards, NonFinite, RewardTensor, combine};

/// What is subtracted from a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// The mean of the sample's group (GRPO, <https://arxiv.org/abs/2402.03300>).
    #[default]
    GroupMean,
    /// The mean of the other samples of the group (RLOO, <https://arxiv.org/abs/2402.14740>).
    LeaveOneOut,
}

/// What the centred reward is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The standard deviation of the rewards of the group.
    #[default]
    Group,
    /// The standard deviation of all rewards of the batch (<https://arxiv.org/abs/2508.08221>).
    Batch,
    /// Nothing (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    None,
}

/// The advantage of a sample that is alone in its group, for which the group says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SingleSample {
    /// An error that names the group.
    #[default]
    Error,
    /// 0 (TRL).
    Zero,
    /// The reward itself (verl, twinkle).
    Raw,
    /// The reward minus the mean of the batch; with [`Scale::Batch`] divided by the batch's standard deviation.
    BatchMean,
}

/// An advantage function: rewards in, how much better each sample did than its group out.
///
/// Made once, called with rewards, `num_generations` (or group ids) and a scale:
///
/// ```
/// use candle_grpo_core::{GroupAdvantage, Scale};
///
/// let rewards = [0.0, 1.0, 0.0, 1.0, /* next prompt */ 1.0, 0.0, 0.0, 0.0];
///
/// let grpo = GroupAdvantage::grpo();
/// let advantages = grpo.compute(&rewards, 4, Scale::None)?;
/// assert_eq!(
///     advantages.to_vec1::<f32>()?,
///     [-0.5, 0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
/// );
///
/// let rloo = GroupAdvantage::rloo();
/// let advantages = rloo.compute(&rewards, 4, Scale::None)?.to_vec1::<f32>()?;
/// assert!((advantages[0] + 0.6667).abs() < 1e-4);
///
/// // Groups of any size, in any order.
/// let group_ids = [9u32, 2, 9, 2, 2];
/// grpo.compute(&[1.0, 0.0, 0.0, 1.0, 0.5], group_ids.as_slice(), Scale::Group)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// With x the reward, n the size of the group, m its mean and s a standard deviation:
/// GRPO is `(x - m) / (s + epsilon)`, RLOO is `(x - m) * n / (n - 1) / (s + epsilon)`; with [`Scale::None`] nothing is
/// divided. Statistics are computed in f64 relative to the smallest reward, in two passes: equal rewards give exactly 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupAdvantage {
    /// What is subtracted.
    pub baseline: Baseline,
    /// Added to the standard deviation. 1e-6 in verl and ROLL, 1e-4 in TRL, 1e-8 in twinkle, 1e-9 in OpenRLHF.
    pub epsilon: f64,
    /// 1 for the standard deviation of a sample (n - 1, as all the peers have it), 0 for that of a population (n).
    pub ddof: usize,
    /// What a group of one gives.
    pub single_sample: SingleSample,
    /// What a reward that is not finite gives.
    pub non_finite: NonFinite,
    /// A weight for each of K reward components; absent: all 1.
    pub reward_weights: Option<Vec<f64>>,
}

impl Default for GroupAdvantage {
    fn default() -> Self {
        Self {
            baseline: Baseline::GroupMean,
            epsilon: 1e-6,
            ddof: 1,
            single_sample: SingleSample::Error,
            non_finite: NonFinite::Error,
            reward_weights: None,
        }
    }
}

impl GroupAdvantage {
    /// Reward minus group mean (<https://arxiv.org/abs/2402.03300>).
    pub fn grpo() -> Self {
        Self::default()
    }

    /// Reward minus the mean of the others of its group (<https://arxiv.org/abs/2402.14740>). The paper divides by
    /// nothing: call it with [`Scale::None`] for that.
    pub fn rloo() -> Self {
        Self {
            baseline: Baseline::LeaveOneOut,
            ..Self::default()
        }
    }

    /// Advantages `[B]` of `rewards` `[B]` or `[B, K]` (components are summed), on the device of the rewards.
    ///
    /// Errs if the rewards are empty or have another shape, if `num_generations` does not divide B, if there is not one
    /// id for each reward, and as [`Self::non_finite`] and [`Self::single_sample`] say.
    pub fn compute(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
        scale: Scale,
    ) -> Result<Tensor> {
        let rewards = rewards.into_rewards()?;
        let stats = self.statistics_of(&rewards, &groups.into())?;
        let advantages = self.centered(&stats)?;
        let advantages = match scale {
            Scale::None => advantages,
            Scale::Group => {
                divide_by_std(&advantages, &stats.moments.std(self.ddof)?, self.epsilon)?
            }
            Scale::Batch => divide_by_std(&advantages, &stats.batch_std(self.ddof)?, self.epsilon)?,
        };
        let advantages = self.with_singles(&stats, advantages, scale)?;
        stats
            .layout
            .to_samples(&advantages)?
            .to_dtype(rewards.result_dtype)
    }

    /// Mean, standard deviation and spread of each group of `rewards`, for filters and metrics.
    pub fn group_statistics(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
    ) -> Result<GroupStatistics> {
        let rewards = rewards.into_rewards()?;
        let stats = self.statistics_of(&rewards, &groups.into())?;
        let moments = &stats.moments;
        Ok(GroupStatistics {
            mean: moments.mean.squeeze(1)?.to_dtype(rewards.result_dtype)?,
            std: moments
                .std(self.ddof)?
                .squeeze(1)?
                .to_dtype(rewards.result_dtype)?,
            count: moments.count.squeeze(1)?.to_dtype(DType::U32)?,
            zero_variance: moments.constant.squeeze(1)?,
        })
    }

    fn statistics_of(&self, rewards: &RewardTensor, groups: &Groups) -> Result<RowStatistics> {
        if !(self.epsilon >= 0. && self.epsilon.is_finite()) {
            bail!("epsilon: {}, must be finite and at least 0", self.epsilon);
        }
        if self.ddof > 1 {
            bail!("ddof: {}, must be 0 or 1", self.ddof);
        }
        let (rewards, finite) = combine(rewards, self.reward_weights.as_deref(), self.non_finite)?;
        let layout = GroupLayout::new(groups, rewards.dim(0)?, rewards.device())?;
        if self.single_sample == SingleSample::Error
            && let Some(group) = layout.sizes().iter().position(|&n| n == 1)
        {
            bail!(
                "num_generations: group {group} has one sample, a relative advantage needs at least two (or choose a SingleSample policy)"
            );
        }
        let rows = layout.to_rows(&rewards)?;
        let selected = (layout.to_rows(&finite)? * layout.present()?)?;
        Ok(RowStatistics {
            moments: Moments::new(&rows, &selected)?,
            rows,
            selected,
            layout,
        })
    }

    /// The rewards minus the baseline, 0 where there is no reward and in groups of one.
    fn centered(&self, stats: &RowStatistics) -> Result<Tensor> {
        let centered = &stats.moments.centered;
        match self.baseline {
            Baseline::GroupMean => Ok(centered.clone()),
            Baseline::LeaveOneOut => {
                let n = &stats.moments.count;
                let factor = (n / (n - 1.)?.maximum(1.)?)?;
                centered.broadcast_mul(&factor)
            }
        }
    }

    fn with_singles(
        &self,
        stats: &RowStatistics,
        advantages: Tensor,
        scale: Scale,
    ) -> Result<Tensor> {
        let replacement = match self.single_sample {
            SingleSample::Error | SingleSample::Zero => return Ok(advantages),
            SingleSample::Raw => stats.rows.clone(),
            SingleSample::BatchMean => {
                let batch = stats.batch_moments()?;
                let centered = batch.centered.reshape(stats.rows.shape())?;
                if scale == Scale::Batch {
                    // The deviation of a batch of one sample is not defined; twinkle takes 1.
                    let std = batch.std(self.ddof)?;
                    let std = batch.count.eq(1.)?.where_cond(&std.ones_like()?, &std)?;
                    divide_by_std(&centered, &std.unsqueeze(0)?, self.epsilon)?
                } else {
                    centered
                }
            }
        };
        let single = stats
            .moments
            .count
            .eq(1.)?
            .broadcast_as(stats.rows.shape())?;
        let single = (single * &stats.selected)?;
        single.where_cond(&replacement, &advantages)
    }
}

/// What is known of each group: P groups in the order in which they first appear.
#[derive(Debug, Clone)]
pub struct GroupStatistics {
    /// The mean reward of each group, `[P]`.
    pub mean: Tensor,
    /// The standard deviation of each group, `[P]`.
    pub std: Tensor,
    /// How many samples with a reward each group has, u32 `[P]`.
    pub count: Tensor,
    /// 1 where all rewards of a group are equal, u8 `[P]`: there is nothing to learn from it.
    pub zero_variance: Tensor,
}

struct RowStatistics {
    layout: GroupLayout,
    /// `[P, W]`
    rows: Tensor,
    /// `[P, W]`, u8: 1 where there is a sample with a reward.
    selected: Tensor,
    moments: Moments,
}

impl RowStatistics {
    fn batch_moments(&self) -> Result<Moments> {
        Moments::new(&self.rows.flatten_all()?, &self.selected.flatten_all()?)
    }

    /// `[1, 1]`
    fn batch_std(&self, ddof: usize) -> Result<Tensor> {
        self.batch_moments()?.std(ddof)?.unsqueeze(0)
    }
}
