//! Sequence advantages: reward minus baseline, divided by a scale.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{
    AdvantageBatch, AdvantageEstimator, Advantages, Baseline, BaselinePopulation, ComponentOrder,
    DEFAULT_EPSILON, KlPenalty, Scale, SingletonGroup, Whitening, ZeroSignalScaling,
};
use crate::Invalid;
use crate::groups::{GroupLayout, Groups};
use crate::inputs::{Input, Inputs};
use crate::metrics::Metrics;
use crate::moments::{Moments, divide_by_std};
use crate::rewards::{
    IntoRewards, NonFinite, RewardTensor, check_finite, check_weights, combine, finite_mask,
    mark_missing, to_result_dtype,
};
use crate::selection::GroupSummary;
use crate::validate::{self, Checked, Name};

/// An advantage function: takes rewards, returns advantages relative to each group.
///
/// Start with [`Self::grpo`]. Use [`Self::rloo`] if you want an unbiased baseline without a
/// division by the standard deviation.
///
/// Create the function once, then call it with the rewards, the group size (or group ids) and a
/// scale:
///
/// ```
/// use candle_grpo_core::{GroupAdvantage, Scale};
///
/// let rewards = [0.0, 1.0, 0.0, 1.0, /* next prompt */ 1.0, 0.0, 0.0, 0.0];
///
/// let grpo = GroupAdvantage::grpo();
/// let advantages = grpo.compute(&rewards, 4, Scale::Group)?.to_vec1::<f32>()?;
/// assert!((advantages[0] + 0.8660).abs() < 1e-4 && (advantages[4] - 1.5).abs() < 1e-4);
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
/// For a reward x in a group with n samples, mean m and standard deviation s:
///
/// ```text
/// GRPO  (x - m) / (s + epsilon)
/// RLOO  (x - m) n / (n - 1), divided by s + epsilon unless the scale is Scale::None
/// ```
///
/// Two methods compute advantages. [`Self::compute`] takes the scale as an argument, which replaces
/// the field [`scale`](Self::scale). [`AdvantageEstimator::estimate`] uses the field, and also
/// supports the KL penalty, because a batch has log-probs. Both apply [`factor`](Self::factor),
/// [`normalize`](Self::normalize) and [`clip`](Self::clip).
///
/// Statistics run in f64, in two passes and relative to the smallest reward, so equal rewards give
/// exactly 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupAdvantage {
    /// KL penalty, subtracted from each sequence reward before anything else (TRL's RLOO). Absent
    /// by default.
    pub kl_penalty: Option<KlPenalty>,
    /// Baseline, subtracted from the reward. Default `group_mean`.
    pub baseline: Baseline,
    /// Divisor. Default `group`.
    pub scale: Scale,
    /// Added to the standard deviation. 1e-6 in verl and ROLL, 1e-4 in TRL, 1e-8 in twinkle, 1e-9
    /// in OpenRLHF. Default `DEFAULT_EPSILON`.
    pub epsilon: f64,
    /// Delta degrees of freedom for the variance: 1 divides by n - 1 (as all these libraries do),
    /// 0 by n. Default 1.
    pub ddof: usize,
    /// Advantage for a sample that is alone in its group. Default `error`.
    pub single_sample: SingletonGroup,
    /// Treatment for non-finite rewards. Default `error`.
    pub non_finite: NonFinite,
    /// Weights for the K reward components. If absent, all weights are 1. Absent by default.
    pub reward_weights: Option<Vec<f64>>,
    /// Order in which components are summed and normalized. Default `sum_then_normalize`.
    pub components: ComponentOrder,
    /// Samples that enter the statistics. Default `all`.
    pub population: BaselinePopulation,
    /// Factor that compensates for samples without a learning signal. Default `none`.
    pub compensation: ZeroSignalScaling,
    /// Constant factor for every advantage (the inverse of GPG's `f_norm`). Default 1.
    pub factor: f64,
    /// Whitening over the whole batch, after the factors. Absent by default.
    pub normalize: Option<Whitening>,
    /// Range that advantages are clipped to, after everything else (OpenRLHF's
    /// `reward.clip_range`). Absent by default.
    pub clip: Option<[f64; 2]>,
}

impl Default for GroupAdvantage {
    /// GRPO.
    fn default() -> Self {
        Self {
            kl_penalty: None,
            baseline: Baseline::GroupMean,
            scale: Scale::Group,
            epsilon: DEFAULT_EPSILON,
            ddof: 1,
            single_sample: SingletonGroup::Error,
            non_finite: NonFinite::Error,
            reward_weights: None,
            components: ComponentOrder::SumThenNormalize,
            population: BaselinePopulation::All,
            compensation: ZeroSignalScaling::None,
            factor: 1.,
            normalize: None,
            clip: None,
        }
    }
}

impl GroupAdvantage {
    /// GRPO: `(x - m) / (s + epsilon)` with [`DEFAULT_EPSILON`] (<https://arxiv.org/abs/2402.03300>).
    pub fn grpo() -> Self {
        Self::default()
    }

    /// RLOO: `x - mean of the others`, without a division (<https://arxiv.org/abs/2402.14740>).
    pub fn rloo() -> Self {
        Self::centered(Baseline::LeaveOneOut)
    }

    /// `x - baseline`, without a division.
    pub fn centered(baseline: Baseline) -> Self {
        Self {
            baseline,
            scale: Scale::None,
            ..Self::default()
        }
    }

    /// Computes advantages `[B]` from `rewards` `[B]` or `[B, K]`, on the same device. The argument
    /// `scale` replaces the field [`scale`](Self::scale). All other options apply, including
    /// [`factor`](Self::factor), [`normalize`](Self::normalize) and [`clip`](Self::clip).
    ///
    /// `groups` is the number of consecutive samples for each prompt, or each sample's group id.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if the rewards are empty or have another shape, or if the
    /// groups do not fit: the group size must divide B, and there must be B ids. Also fails as
    /// [`non_finite`](Self::non_finite) and [`single_sample`](Self::single_sample) describe. On the
    /// CPU, fails if a reward is beyond 1e150, or if an advantage overflows the result dtype.
    /// Options that need more than rewards and groups, such as the KL penalty, require
    /// [`AdvantageEstimator::estimate`].
    pub fn compute(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
        scale: Scale,
    ) -> Result<Tensor> {
        let function = Self {
            scale,
            ..self.clone()
        };
        let batch = AdvantageBatch::without_rewards(groups.into());
        let rewards = rewards.into_rewards()?;
        let advantages = function.estimate_from(&rewards, &batch)?.advantages;
        to_result_dtype("advantage", &advantages, rewards.result_dtype)
    }

    /// Computes each group's mean, standard deviation and spread, for filters and metrics.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::compute`].
    pub fn group_statistics(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
    ) -> Result<GroupStatistics> {
        // The statistics do not depend on the scale.
        let function = Self {
            scale: Scale::None,
            ..self.clone()
        };
        function.validate()?;
        let rewards = rewards.into_rewards()?;
        let weights = self.reward_weights.as_deref();
        let combined = combine(&rewards, weights, self.non_finite)?;
        let batch = AdvantageBatch::without_rewards(groups.into());
        let context = Context::new(&combined.0, &batch)?;
        let stats = function.statistics(&context, &combined)?;
        let moments = &stats.moments;
        let column = |x: &Tensor, dtype| x.squeeze(1)?.to_dtype(dtype);
        Ok(GroupStatistics {
            mean: column(&moments.mean, rewards.result_dtype)?,
            std: column(&moments.std(self.ddof)?, rewards.result_dtype)?,
            count: column(&moments.count, DType::U32)?,
            zero_variance: moments.constant.squeeze(1)?,
        })
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        if let Some(penalty) = &self.kl_penalty {
            penalty.validate().map_err(|e| e.within("kl_penalty"))?;
        }
        // With another baseline, a group with equal rewards may have nonzero differences, which
        // would be divided by epsilon alone.
        if matches!(self.scale, Scale::Group | Scale::GroupMean)
            && !self.baseline.is_group_relative()
        {
            return Err(Invalid::new(
                "scale",
                format_args!(
                    "{} with the baseline {}",
                    Name(&self.scale),
                    Name(&self.baseline)
                ),
                "be batch or none for a baseline that is not one of the group",
            ));
        }
        validate::non_negative("epsilon", self.epsilon)?;
        validate::ddof("ddof", self.ddof)?;
        validate::finite("factor", self.factor)?;
        check_weights(self.reward_weights.as_deref())?;
        if let Some(normalize) = &self.normalize {
            normalize.validate().map_err(|e| e.within("normalize"))?;
        }
        match self.clip {
            Some(clip) => validate::range("clip", clip),
            None => Ok(()),
        }
    }

    /// Computes the advantages in the statistics dtype.
    pub(super) fn estimate_from(
        &self,
        rewards: &RewardTensor,
        batch: &AdvantageBatch,
    ) -> Result<Advantages> {
        self.validate()?;
        let penalized;
        let (rewards, weights) = match &self.kl_penalty {
            None => (rewards, self.reward_weights.as_deref()),
            Some(penalty) => {
                penalized = self.penalized(penalty, rewards, batch)?;
                (&penalized, None)
            }
        };
        let combined = combine(rewards, weights, self.non_finite)?;
        let context = Context::new(&combined.0, batch)?;
        let sums = self.statistics(&context, &combined)?;
        let advantages = match (self.components, rewards.values.dims()) {
            (ComponentOrder::NormalizeThenSum, &[_, components]) => {
                let mut sum = sums.rows.zeros_like()?;
                for k in 0..components {
                    let component = RewardTensor {
                        values: rewards.values.narrow(1, k, 1)?.squeeze(1)?,
                        ..*rewards
                    };
                    // `combined` already decided whether a missing score is an error.
                    let component = combine(&component, None, NonFinite::Exclude)?;
                    let stats = self.statistics(&context, &component)?;
                    let weight = weights.map_or(1., |w| w[k]);
                    sum = (sum + (self.relative(&stats, &context)? * weight)?)?;
                }
                sum
            }
            _ => self.relative(&sums, &context)?,
        };
        let mut advantages = (self.compensated(&sums, advantages)? * self.factor)?;
        if let Some(normalize) = &self.normalize {
            let normalized = normalize.apply_selected(&advantages, &sums.selected)?;
            advantages = sums
                .selected
                .where_cond(&normalized, &advantages.zeros_like()?)?;
        }
        let advantages = sums.layout.to_samples(&advantages)?;
        let mut metrics = Metrics::new();
        let advantages = match self.clip {
            None => advantages,
            Some([low, high]) => {
                let clipped = advantages.clamp(low, high)?;
                let changed = advantages.ne(&clipped)?.to_dtype(DType::F32)?;
                let count = changed.ones_like()?.sum_all()?;
                metrics.push_mean("sequence_clip_fraction", &changed.sum_all()?, &count)?;
                clipped
            }
        };
        Ok(Advantages {
            metrics,
            ..Advantages::new(advantages)
        })
    }

    /// Returns the weighted reward sums `[B]` minus the KL penalty.
    fn penalized(
        &self,
        penalty: &KlPenalty,
        rewards: &RewardTensor,
        batch: &AdvantageBatch,
    ) -> Result<RewardTensor> {
        let weights = self.reward_weights.as_deref();
        let (sums, scored) = combine(rewards, weights, self.non_finite)?;
        let sums = mark_missing(&sums, &scored)?;
        Ok(RewardTensor {
            values: penalty.penalize_sequence_rewards(&sums, batch)?,
            ..*rewards
        })
    }

    /// Returns which samples enter the statistics, u8 `[B]`.
    fn selected(
        &self,
        context: &Context<'_>,
        (rewards, finite): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let mut selected = finite.clone();
        if self.population == BaselinePopulation::Unmasked {
            selected = (selected * context.lengths(rewards)?.gt(0.)?)?;
        }
        if self.baseline == Baseline::Given {
            let baselines = context.baselines()?;
            let known = finite_mask(&baselines)?;
            if self.non_finite == NonFinite::Error {
                check_finite("reward_baselines", &baselines, &known)?;
            }
            selected = (selected * known)?;
        }
        Ok(selected)
    }

    fn statistics(
        &self,
        context: &Context<'_>,
        combined: &(Tensor, Tensor),
    ) -> Result<RowStatistics> {
        let (rewards, _) = combined;
        let layout = GroupLayout::new(&context.batch.groups, context.samples, rewards.device())?;
        if self.single_sample == SingletonGroup::Error
            && self.baseline.is_group_relative()
            && let Some(group) = layout.sizes().iter().position(|&n| n == 1)
        {
            bail!(
                "groups: group {group} has one sample, a relative advantage needs at least two (or set single_sample)"
            );
        }
        let selected = self.selected(context, combined)?;
        let rows = layout.to_rows(rewards)?;
        let selected = (layout.to_rows(&selected)? * layout.present()?)?;
        Ok(RowStatistics {
            moments: Moments::new(&rows, &selected)?,
            rows,
            selected,
            layout,
        })
    }

    /// Returns the rewards minus the baseline, divided by the scale: `[P, W]`, 0 where there is no
    /// reward.
    fn relative(&self, stats: &RowStatistics, context: &Context<'_>) -> Result<Tensor> {
        let centered = self.subtract_baseline(stats, context)?;
        let advantages = match self.scale {
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
        if self.baseline.is_group_relative() {
            self.replace_singletons(stats, advantages)
        } else {
            Ok(advantages)
        }
    }

    /// Returns the rewards minus the baseline. The result is 0 where there is no reward and, for a
    /// group baseline, in groups with one sample.
    fn subtract_baseline(&self, stats: &RowStatistics, context: &Context<'_>) -> Result<Tensor> {
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
                let lengths = select(&stats.layout.to_rows(&context.lengths(&stats.rows)?)?)?;
                let sum = (centered * &lengths)?.sum_keepdim(1)?;
                let above_mean = (sum / lengths.sum_keepdim(1)?.maximum(1.)?)?;
                select(&centered.broadcast_sub(&above_mean)?)
            }
            Baseline::BestOfOthers => margin_over_second(stats),
            Baseline::BatchMean => stats.batch_moments()?.centered.reshape(stats.rows.shape()),
            Baseline::Given => {
                let baselines = stats.layout.to_rows(&context.baselines()?)?;
                select(&(&stats.rows - baselines)?)
            }
            Baseline::None => select(&stats.rows),
        }
    }

    fn compensated(&self, sums: &RowStatistics, advantages: Tensor) -> Result<Tensor> {
        let with_signal = match self.compensation {
            ZeroSignalScaling::None => return Ok(advantages),
            ZeroSignalScaling::GroupsWithSpread => {
                let constant = sums.moments.constant.broadcast_as(sums.rows.shape())?;
                constant.where_cond(&sums.selected.zeros_like()?, &sums.selected)?
            }
            ZeroSignalScaling::NonZeroRewards => (sums.rows.ne(0.)? * &sums.selected)?,
        };
        let count = |x: &Tensor| x.to_dtype(sums.rows.dtype())?.sum_all();
        let factor = (count(&sums.selected)? / count(&with_signal)?.maximum(1.)?)?;
        advantages.broadcast_mul(&factor)
    }

    /// Replaces the advantages for samples that are alone in their group.
    fn replace_singletons(&self, stats: &RowStatistics, advantages: Tensor) -> Result<Tensor> {
        let replacement = match self.single_sample {
            SingletonGroup::Error | SingletonGroup::Zero => return Ok(advantages),
            SingletonGroup::Raw => stats.rows.clone(),
            SingletonGroup::BatchMean => {
                let batch = stats.batch_moments()?;
                let centered = batch.centered.reshape(stats.rows.shape())?;
                if self.scale == Scale::Batch {
                    // The standard deviation is undefined for a single sample; twinkle uses 1.
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

impl AdvantageEstimator for GroupAdvantage {
    /// Computes advantages `[B]` from the batch's rewards `[B]` or `[B, K]` or, if these are
    /// absent, from its summed token rewards.
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        let rewards = batch.sequence_rewards()?;
        let wide = self.estimate_from(&rewards, batch)?;
        Ok(Advantages {
            advantages: to_result_dtype("advantage", &wide.advantages, rewards.result_dtype)?,
            ..wide
        })
    }

    fn needs(&self) -> Inputs {
        let log_probs = [Input::OldLogProbs, Input::RefLogProbs];
        Inputs::when(self.kl_penalty.is_some(), log_probs)
            | Inputs::when(self.baseline == Baseline::Given, Input::RewardBaselines)
    }
}

/// Returns each best sample's margin over the second best in its group, and 0 for the others.
fn margin_over_second(stats: &RowStatistics) -> Result<Tensor> {
    let centered = &stats.moments.centered;
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
    let margin = best.broadcast_sub(&second)?.broadcast_as(x.shape())?;
    let zeros = x.zeros_like()?;
    // A sample that is alone has an infinite margin; `replace_singletons` decides what it gets.
    let alone = stats.moments.count.le(1.)?.broadcast_as(x.shape())?;
    let margin = (shared + alone)?.where_cond(&zeros, &margin)?;
    is_best.where_cond(&margin, &zeros)
}

/// Statistics for each of P groups, ordered by their first sample.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupStatistics {
    /// Mean reward, `[P]`.
    pub mean: Tensor,
    /// Standard deviation, `[P]`.
    pub std: Tensor,
    /// Number of samples that have a reward, u32 `[P]`.
    pub count: Tensor,
    /// 1 where all rewards in the group are equal, so the group has no learning signal: u8 `[P]`.
    pub zero_variance: Tensor,
}

impl GroupStatistics {
    /// Copies the statistics to the host in one transfer. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot copy.
    pub fn summaries(&self) -> Result<Vec<GroupSummary>> {
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

/// A batch's tensors, without its rewards.
struct Context<'a> {
    samples: usize,
    batch: &'a AdvantageBatch,
}

impl<'a> Context<'a> {
    /// Creates the context for the combined rewards `[B]`.
    fn new(rewards: &Tensor, batch: &'a AdvantageBatch) -> Result<Self> {
        let samples = rewards.dims1()?;
        Ok(Self { samples, batch })
    }

    /// Returns each sequence's number of tokens, `[B]` in `like`'s dtype.
    fn lengths(&self, like: &Tensor) -> Result<Tensor> {
        let lengths = self.batch.mask()?.lengths(like.dtype())?.squeeze(1)?;
        self.one_for_each_reward("response_mask", lengths)
    }

    /// Returns the reward baselines, `[B]`.
    fn baselines(&self) -> Result<Tensor> {
        let baselines = self.batch.baselines()?;
        self.one_for_each_reward("reward_baselines", baselines)
    }

    fn one_for_each_reward(&self, name: &str, x: Tensor) -> Result<Tensor> {
        if x.dims() != [self.samples] {
            bail!(
                "{name}: {:?} for {} rewards, there must be one for each",
                x.dims(),
                self.samples
            );
        }
        Ok(x)
    }
}

/// Rewards with one row per group, and their moments.
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
