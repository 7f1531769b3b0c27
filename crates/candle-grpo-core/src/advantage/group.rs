//! Advantages of sequences: reward minus baseline, divided by a scale.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::Whitening;
use crate::groups::{GroupLayout, Groups};
use crate::mask::Mask;
use crate::moments::{Moments, divide_by_std};
use crate::rewards::{
    IntoRewards, NonFinite, RewardTensor, check_finite, check_weights, combine, finite_mask,
};
use crate::selection::GroupSummary;
use crate::validate;

/// What is subtracted from a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// The mean of the sample's group (GRPO, <https://arxiv.org/abs/2402.03300>).
    #[default]
    GroupMean,
    /// The mean of the other samples of the group (RLOO, <https://arxiv.org/abs/2402.14740>).
    LeaveOneOut,
    /// The mean of the group, each sample weighted by its number of tokens (OPO, <https://arxiv.org/abs/2505.23585>). Needs
    /// a response mask.
    LengthWeighted,
    /// The best of the other samples of the group, and only what exceeds it counts: the best sample of a group gets what it
    /// is ahead of the second, all others 0. Two best samples get 0 as well (pass@k, <https://arxiv.org/abs/2503.19595>).
    BestOfOthers,
    /// The mean of the batch (OpenRLHF's `flash_reinforce`).
    BatchMean,
    /// The `reward_baselines` of the batch, such as the rewards of greedy answers (ReMax,
    /// <https://arxiv.org/abs/2310.10505>).
    Given,
    /// Nothing.
    None,
}

impl Baseline {
    /// Whether it says something about a sample only if its group has another.
    fn needs_others(self) -> bool {
        match self {
            Self::GroupMean | Self::LeaveOneOut | Self::LengthWeighted | Self::BestOfOthers => true,
            Self::BatchMean | Self::Given | Self::None => false,
        }
    }
}

/// What the centred reward is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The standard deviation of the rewards of the group. Needs a baseline that is one of the group.
    #[default]
    Group,
    /// The standard deviation of all rewards of the batch (<https://arxiv.org/abs/2508.08221>).
    Batch,
    /// The mean reward of the group, for rewards that are not negative (MaxRL, as in SkyRL and prime-rl). Needs a
    /// baseline that is one of the group. A group whose mean is not positive gets 0.
    GroupMean,
    /// Nothing (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    None,
}

/// How several components of a reward become one advantage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Components {
    /// The weighted sum of the components is a reward like any other.
    #[default]
    SumThenNormalize,
    /// Each component gives an advantage, of which the weighted sum is taken: none drowns in the spread of another (GDPO,
    /// <https://arxiv.org/abs/2601.05242>).
    NormalizeThenSum,
}

/// Which samples take part in means and standard deviations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaselinePopulation {
    /// All: the reward of a sample that is not trained on is information all the same.
    #[default]
    All,
    /// Those that have a token in the response mask; the others get the advantage 0. Needs a response mask.
    Unmasked,
}

/// A factor that makes up for samples that teach nothing: B / (number of samples that do), as GPG has it
/// (<https://arxiv.org/abs/2504.02546>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compensation {
    /// 1.
    #[default]
    None,
    /// A sample teaches if it is in a group whose rewards differ, as the paper has it.
    GroupsWithSpread,
    /// A sample teaches if its reward is not 0, as verl counts it: for rewards of 1 and -1 the factor is always 1.
    NonZeroRewards,
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
    /// Whether components are summed before or after.
    pub components: Components,
    /// Which samples the statistics are of.
    pub population: BaselinePopulation,
    /// A factor for the samples that teach nothing.
    pub compensation: Compensation,
    /// Another factor, by which every advantage is multiplied (the inverse of GPG's `f_norm`).
    pub factor: f64,
    /// What happens to the advantages of the whole batch, at last.
    pub normalize: Option<Whitening>,
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
            components: Components::SumThenNormalize,
            population: BaselinePopulation::All,
            compensation: Compensation::None,
            factor: 1.,
            normalize: None,
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
        self.compute_on(
            &SequenceInputs {
                rewards: rewards.into_rewards()?,
                groups: &groups.into(),
                mask: None,
                reward_baselines: None,
            },
            scale,
        )
    }

    pub(crate) fn compute_on(&self, inputs: &SequenceInputs<'_>, scale: Scale) -> Result<Tensor> {
        self.validate_with(scale)?;
        let rewards = &inputs.rewards;
        let combined = self.combined(rewards)?;
        let sums = self.statistics_of(inputs, &combined)?;
        let advantages = match (self.components, rewards.values.dims()) {
            (Components::NormalizeThenSum, &[_, components]) => {
                let mut sum = sums.rows.zeros_like()?;
                for k in 0..components {
                    let component = RewardTensor {
                        values: rewards.values.narrow(1, k, 1)?.squeeze(1)?,
                        ..*rewards
                    };
                    // Whether a missing score is an error has been decided for all components together.
                    let component = combine(&component, None, NonFinite::Exclude)?;
                    let stats = self.statistics_of(inputs, &component)?;
                    let weight = self.reward_weights.as_ref().map_or(1., |w| w[k]);
                    sum = (sum + (self.relative(&stats, inputs, scale)? * weight)?)?;
                }
                sum
            }
            _ => self.relative(&sums, inputs, scale)?,
        };
        let mut advantages = (self.compensated(&sums, advantages)? * self.factor)?;
        if let Some(normalize) = &self.normalize {
            let normalized = normalize.apply_selected(&advantages, &sums.selected)?;
            advantages = sums
                .selected
                .where_cond(&normalized, &advantages.zeros_like()?)?;
        }
        sums.layout
            .to_samples(&advantages)?
            .to_dtype(rewards.result_dtype)
    }

    /// Mean, standard deviation and spread of each group of `rewards`, for filters and metrics.
    pub fn group_statistics(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
    ) -> Result<GroupStatistics> {
        self.validate()?;
        let rewards = rewards.into_rewards()?;
        let inputs = SequenceInputs {
            groups: &groups.into(),
            mask: None,
            reward_baselines: None,
            rewards,
        };
        let rewards = &inputs.rewards;
        let stats = self.statistics_of(&inputs, &self.combined(rewards)?)?;
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

    /// Checks the options; the error names the one that is wrong.
    ///
    /// Whether the scale goes with them, [`crate::SequenceAdvantage::validate`] says, which has one.
    pub fn validate(&self) -> Result<()> {
        validate::non_negative("epsilon", self.epsilon)?;
        if self.ddof > 1 {
            bail!("ddof: {}, must be 0 or 1", self.ddof);
        }
        if !self.factor.is_finite() {
            bail!("factor: {}, must be finite", self.factor);
        }
        check_weights(self.reward_weights.as_deref())?;
        if let Some(normalize) = &self.normalize {
            normalize.validate()?;
        }
        Ok(())
    }

    /// [`Self::validate`], and whether the scale goes with the baseline.
    pub(crate) fn validate_with(&self, scale: Scale) -> Result<()> {
        self.validate()?;
        // Where all rewards of a group are equal, a distance from anything else would be divided by epsilon alone.
        if matches!(scale, Scale::Group | Scale::GroupMean) && !self.baseline.needs_others() {
            bail!(
                "scale: {scale:?} with the baseline {:?}, must be Batch or None for a baseline that is not one of the group",
                self.baseline
            );
        }
        Ok(())
    }

    /// The weighted sums of the components, and which samples have one.
    fn combined(&self, rewards: &RewardTensor) -> Result<(Tensor, Tensor)> {
        combine(rewards, self.reward_weights.as_deref(), self.non_finite)
    }

    /// Which samples take part in statistics, u8 `[B]`.
    fn selected(
        &self,
        inputs: &SequenceInputs<'_>,
        (rewards, finite): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let mut selected = finite.clone();
        if self.population == BaselinePopulation::Unmasked {
            selected = (selected * inputs.lengths(rewards)?.gt(0.)?)?;
        }
        if self.baseline == Baseline::Given {
            let baselines = inputs.baselines(rewards)?;
            let known = finite_mask(&baselines)?;
            if self.non_finite == NonFinite::Error {
                check_finite("reward_baselines", &baselines, &known)?;
            }
            selected = (selected * known)?;
        }
        Ok(selected)
    }

    fn statistics_of(
        &self,
        inputs: &SequenceInputs<'_>,
        combined: &(Tensor, Tensor),
    ) -> Result<RowStatistics> {
        let (rewards, _) = combined;
        let layout = GroupLayout::new(inputs.groups, rewards.dim(0)?, rewards.device())?;
        if self.single_sample == SingleSample::Error
            && self.baseline.needs_others()
            && let Some(group) = layout.sizes().iter().position(|&n| n == 1)
        {
            bail!(
                "num_generations: group {group} has one sample, a relative advantage needs at least two (or choose a SingleSample policy)"
            );
        }
        let selected = self.selected(inputs, combined)?;
        let rows = layout.to_rows(rewards)?;
        let selected = (layout.to_rows(&selected)? * layout.present()?)?;
        Ok(RowStatistics {
            moments: Moments::new(&rows, &selected)?,
            rows,
            selected,
            layout,
        })
    }

    /// The rewards minus the baseline, divided by the scale: `[P, W]`, 0 where there is no reward.
    fn relative(
        &self,
        stats: &RowStatistics,
        inputs: &SequenceInputs<'_>,
        scale: Scale,
    ) -> Result<Tensor> {
        let centered = self.centered(stats, inputs)?;
        let advantages = match scale {
            Scale::None => centered,
            Scale::Group => divide_by_std(&centered, &stats.moments.std(self.ddof)?, self.epsilon)?,
            Scale::Batch => divide_by_std(&centered, &stats.batch_std(self.ddof)?, self.epsilon)?,
            Scale::GroupMean => {
                let mean = &stats.moments.mean;
                let positive = mean.gt(0.)?;
                let mean = positive.where_cond(&(mean + self.epsilon)?, &mean.ones_like()?)?;
                let advantages = centered.broadcast_div(&mean)?;
                positive
                    .broadcast_as(advantages.shape())?
                    .where_cond(&advantages, &advantages.zeros_like()?)?
            }
        };
        if self.baseline.needs_others() {
            self.with_singles(stats, advantages, scale)
        } else {
            Ok(advantages)
        }
    }

    /// The rewards minus the baseline, 0 where there is no reward and, for a baseline of the group, in groups of one.
    fn centered(&self, stats: &RowStatistics, inputs: &SequenceInputs<'_>) -> Result<Tensor> {
        let centered = &stats.moments.centered;
        let select = |x: &Tensor| stats.selected.where_cond(x, &x.zeros_like()?);
        match self.baseline {
            Baseline::GroupMean => Ok(centered.clone()),
            Baseline::LeaveOneOut => {
                let n = &stats.moments.count;
                let factor = (n / (n - 1.)?.maximum(1.)?)?;
                centered.broadcast_mul(&factor)
            }
            Baseline::LengthWeighted => {
                let lengths = select(&stats.layout.to_rows(&inputs.lengths(&stats.rows)?)?)?;
                let sum = (centered * &lengths)?.sum_keepdim(1)?;
                let above_mean = (sum / lengths.sum_keepdim(1)?.maximum(1.)?)?;
                select(&centered.broadcast_sub(&above_mean)?)
            }
            Baseline::BestOfOthers => {
                let lowest = (centered.zeros_like()? + f64::NEG_INFINITY)?;
                let x = stats.selected.where_cond(centered, &lowest)?;
                let best = x.max_keepdim(1)?;
                let is_best = (x.broadcast_eq(&best)? * &stats.selected)?;
                let shared = is_best
                    .to_dtype(x.dtype())?
                    .sum_keepdim(1)?
                    .gt(1.)?
                    .broadcast_as(x.shape())?;
                let second = is_best.where_cond(&lowest, &x)?.max_keepdim(1)?;
                let ahead = best.broadcast_sub(&second)?.broadcast_as(x.shape())?;
                let zeros = x.zeros_like()?;
                // Alone, a sample is infinitely far ahead; what a group of one gives is decided elsewhere.
                let alone = stats.moments.count.le(1.)?.broadcast_as(x.shape())?;
                let ahead = (shared + alone)?.where_cond(&zeros, &ahead)?;
                is_best.where_cond(&ahead, &zeros)
            }
            Baseline::BatchMean => stats.batch_moments()?.centered.reshape(stats.rows.shape()),
            Baseline::Given => {
                let baselines = stats.layout.to_rows(&inputs.baselines(&stats.rows)?)?;
                select(&(&stats.rows - baselines)?)
            }
            Baseline::None => select(&stats.rows),
        }
    }

    fn compensated(&self, sums: &RowStatistics, advantages: Tensor) -> Result<Tensor> {
        let teaching = match self.compensation {
            Compensation::None => return Ok(advantages),
            Compensation::GroupsWithSpread => {
                let constant = sums.moments.constant.broadcast_as(sums.rows.shape())?;
                constant.where_cond(&sums.selected.zeros_like()?, &sums.selected)?
            }
            Compensation::NonZeroRewards => (sums.rows.ne(0.)? * &sums.selected)?,
        };
        let count = |x: &Tensor| x.to_dtype(sums.rows.dtype())?.sum_all();
        let factor = (count(&sums.selected)? / count(&teaching)?.maximum(1.)?)?;
        advantages.broadcast_mul(&factor)
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

impl GroupStatistics {
    /// The figures of each group, copied to the host in one transfer.
    pub fn to_host(&self) -> Result<Vec<GroupSummary>> {
        let columns = [
            self.mean.to_dtype(DType::F64)?,
            self.std.to_dtype(DType::F64)?,
            self.count.to_dtype(DType::F64)?,
            self.zero_variance.to_dtype(DType::F64)?,
        ];
        let rows = Tensor::stack(&columns, 1)?.to_vec2::<f64>()?;
        let summary = |row: &Vec<f64>| GroupSummary {
            mean: row[0],
            std: row[1],
            count: row[2] as usize,
            zero_variance: row[3] != 0.,
        };
        Ok(rows.iter().map(summary).collect())
    }
}

/// What advantages of sequences are computed from.
pub(crate) struct SequenceInputs<'a> {
    pub(crate) rewards: RewardTensor,
    pub(crate) groups: &'a Groups,
    pub(crate) mask: Option<&'a Mask>,
    pub(crate) reward_baselines: Option<&'a Tensor>,
}

impl SequenceInputs<'_> {
    /// The number of tokens of each sequence, `[B]` in the dtype of `like`.
    fn lengths(&self, like: &Tensor) -> Result<Tensor> {
        let Some(mask) = self.mask else {
            bail!(
                "response_mask: absent, must be given for a length-weighted baseline and for a population of unmasked samples"
            );
        };
        let lengths = mask.lengths(like.dtype())?.squeeze(1)?;
        self.one_for_each_reward("response_mask", lengths)
    }

    /// `[B]` in the dtype of `like`.
    fn baselines(&self, like: &Tensor) -> Result<Tensor> {
        let Some(baselines) = self.reward_baselines else {
            bail!("reward_baselines: absent, must be given for this baseline");
        };
        let baselines = baselines.detach().to_dtype(like.dtype())?;
        self.one_for_each_reward("reward_baselines", baselines)
    }

    fn one_for_each_reward(&self, name: &str, x: Tensor) -> Result<Tensor> {
        let batch = self.rewards.values.dim(0)?;
        if x.dims() != [batch] {
            bail!(
                "{name}: {:?} for {batch} rewards, there must be one for each",
                x.dims()
            );
        }
        Ok(x)
    }
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
