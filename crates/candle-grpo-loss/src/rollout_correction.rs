//! Weights and filters for samples that another engine drew with another precision, or an older policy.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics, arithmetic_dtype};
use serde::{Deserialize, Serialize};

use crate::importance::{ImportanceLevel, k3};
use crate::limits::check_positive;

/// Corrects for the difference between the policy that sampled and the old policy as the trainer sees it, with
/// `d = old_log_probs - rollout_log_probs`.
///
/// It is computed once over a whole step, as its normalisation and the counts after filtering are those of the step.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::{ImportanceWeight, RolloutCorrection};
///
/// let device = Device::Cpu;
/// let old_log_probs = Tensor::new(&[[-1f32, -0.5, -2.]], &device)?;
/// let rollout_log_probs = Tensor::new(&[[-1.1f32, -0.4, -4.]], &device)?;
/// let response_mask = Tensor::new(&[[1u8, 1, 1]], &device)?;
///
/// let correction = RolloutCorrection {
///     weight: Some(ImportanceWeight::truncated(2.0)),
///     ..Default::default()
/// };
/// let corrected = correction.compute(&old_log_probs, &rollout_log_probs, &response_mask)?;
/// let weights = corrected.weights.unwrap().to_vec2::<f32>()?;
/// assert!((weights[0][0] - 1.105).abs() < 1e-3 && weights[0][2] == 2.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutCorrection {
    /// The weight of the policy term; absent: 1.
    pub weight: Option<ImportanceWeight>,
    /// Tokens have to pass all of these.
    pub filters: Vec<RolloutFilter>,
    /// `d`, and its sum over a sequence, is clamped to plus and minus this before it is exponentiated.
    pub log_ratio_clamp: Option<f64>,
}

impl Default for RolloutCorrection {
    fn default() -> Self {
        Self {
            weight: None,
            filters: Vec::new(),
            log_ratio_clamp: Some(20.),
        }
    }
}

/// `exp(d)` at a level, within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImportanceWeight {
    /// Over what d is averaged: the token, the sequence (geometric mean), its product, or the segment.
    pub level: ImportanceLevel,
    /// The lower bound.
    pub min: Option<f64>,
    /// The upper bound.
    pub max: Option<f64>,
    /// What a weight outside the bounds becomes.
    pub outside: Outside,
    /// Whether weights are divided by their mean over the tokens.
    pub normalize: bool,
}

impl Default for ImportanceWeight {
    fn default() -> Self {
        Self::truncated(2.)
    }
}

impl ImportanceWeight {
    /// A weight for each token, at most `max` (truncated importance sampling).
    pub fn truncated(max: f64) -> Self {
        Self {
            level: ImportanceLevel::Token,
            min: None,
            max: Some(max),
            outside: Outside::Truncate,
            normalize: false,
        }
    }

    /// A weight for each token, 0 outside the bounds (IcePop, <https://arxiv.org/abs/2510.18855>).
    pub fn icepop(min: f64, max: f64) -> Self {
        Self {
            min: Some(min),
            outside: Outside::Mask,
            ..Self::truncated(max)
        }
    }
}

/// What a weight outside its bounds becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outside {
    /// The bound.
    #[default]
    Truncate,
    /// 0.
    Mask,
}

/// A statistic of the difference between the two policies that must stay within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutFilter {
    /// What is bounded.
    pub statistic: FilterStatistic,
    /// Over what it is taken.
    pub level: FilterLevel,
    /// The lower bound.
    #[serde(default)]
    pub min: Option<f64>,
    /// The upper bound.
    #[serde(default)]
    pub max: Option<f64>,
}

/// A statistic of one token, with `d = old_log_probs - rollout_log_probs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilterStatistic {
    /// `d`; its bounds are logarithms of bounds of the ratio. Its mean over a sequence is the logarithm of the geometric
    /// mean of the ratios.
    LogRatio,
    /// `exp(old_log_probs) - exp(rollout_log_probs)`.
    ProbabilityDifference,
    /// `-d`, whose mean estimates KL(rollout || old).
    K1,
    /// `d^2 / 2`.
    K2,
    /// `exp(d) - 1 - d`.
    K3,
}

/// Over what a statistic is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilterLevel {
    /// Each token passes or not.
    Token,
    /// The mean over each run of consecutive tokens of the mask.
    Segment,
    /// The mean over the sequence: all its tokens pass, or none.
    SequenceMean,
    /// The sum over the sequence.
    SequenceSum,
    /// The largest of the sequence.
    SequenceMax,
}

/// What [`RolloutCorrection::compute`] returns.
#[derive(Debug, Clone)]
pub struct Corrected {
    /// Weights of the policy term, `[B, T]`, for [`crate::PolicyBatch::importance_weights`].
    pub weights: Option<Tensor>,
    /// The tokens of the mask that pass the filters, u8 `[B, T]`. As the response mask they leave the denominators as
    /// well; as [`crate::PolicyBatch::policy_mask`] they leave the policy term only.
    pub kept: Tensor,
    /// Over the tokens of the response mask: `rollout_kl` (mean of `-d`), `rollout_kl_k3`, `rollout_weight_mean`, `_max`,
    /// `_min` and `_square` (the mean of the squared weight: the share of effective samples is
    /// `mean^2 / square`), `rollout_truncated_fraction`, `rollout_rejected_fraction`.
    pub metrics: Metrics,
}

impl RolloutCorrection {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        if let Some(c) = self.log_ratio_clamp {
            check_positive("rollout_correction.log_ratio_clamp", c)?;
        }
        if let Some(weight) = &self.weight {
            if weight.min.is_some_and(|x| !(x >= 0. && x.is_finite()))
                || weight.max.is_some_and(|x| !(x > 0. && x.is_finite()))
            {
                bail!(
                    "rollout_correction.weight: {weight:?}, bounds are ratios and must not be negative"
                );
            }
            check_order("rollout_correction.weight", weight.min, weight.max)?;
            if weight.level == ImportanceLevel::SequenceToken {
                bail!(
                    "rollout_correction.weight.level: sequence_token is about gradients, must be another"
                );
            }
        }
        for filter in &self.filters {
            if filter.min.is_none() && filter.max.is_none() {
                bail!("rollout_correction.filters: {filter:?} has no bound, must have min or max");
            }
            check_order("rollout_correction.filters", filter.min, filter.max)?;
        }
        Ok(())
    }

    /// Weights and kept tokens from the log-probs `[B, T]` of the old policy and of the engine that sampled.
    pub fn compute(
        &self,
        old_log_probs: &Tensor,
        rollout_log_probs: &Tensor,
        response_mask: &Tensor,
    ) -> Result<Corrected> {
        self.validate()?;
        let mask = Mask::new(response_mask)?;
        let dtype = arithmetic_dtype(old_log_probs.dtype());
        let clean = |name: &str, x: &Tensor| -> Result<Tensor> {
            mask.check_shape(name, x)?;
            mask.select(&x.detach().to_dtype(dtype)?)
        };
        let old = clean("old_log_probs", old_log_probs)?;
        let rollout = clean("rollout_log_probs", rollout_log_probs)?;
        let d = self.clamped(&(&old - &rollout)?)?;

        let mut metrics = Metrics::new();
        metrics.push_masked_mean("rollout_kl", &d.neg()?, &mask)?;
        metrics.push_masked_mean("rollout_kl_k3", &k3(&d)?, &mask)?;
        let weights = match &self.weight {
            None => None,
            Some(weight) => Some(self.weights(weight, &d, &mask, &mut metrics)?),
        };
        let mut kept = mask.selected().clone();
        for filter in &self.filters {
            kept = (kept * filter.passes(&d, &old, &rollout, &mask)?)?;
        }
        metrics.push_masked_mean("rollout_rejected_fraction", &kept.eq(0u8)?, &mask)?;
        Ok(Corrected {
            weights,
            kept,
            metrics,
        })
    }

    fn clamped(&self, d: &Tensor) -> Result<Tensor> {
        match self.log_ratio_clamp {
            Some(c) => d.clamp(-c, c),
            None => Ok(d.clone()),
        }
    }

    fn weights(
        &self,
        weight: &ImportanceWeight,
        d: &Tensor,
        mask: &Mask,
        metrics: &mut Metrics,
    ) -> Result<Tensor> {
        let raw = self.clamped(&weight.level.log_ratio(d, mask)?)?.exp()?;
        let mut bounded = raw.clone();
        if let Some(max) = weight.max {
            bounded = bounded.minimum(max)?;
        }
        if let Some(min) = weight.min {
            bounded = bounded.maximum(min)?;
        }
        let outside = bounded.ne(&raw)?;
        if weight.outside == Outside::Mask {
            bounded = outside.where_cond(&bounded.zeros_like()?, &bounded)?;
        }
        metrics.push_masked_mean("rollout_truncated_fraction", &outside, mask)?;
        metrics.push_masked_mean("rollout_weight_mean", &bounded, mask)?;
        metrics.push_masked_mean("rollout_weight_square", &bounded.sqr()?, mask)?;
        metrics.push_masked_max("rollout_weight_max", &bounded, mask)?;
        metrics.push_masked_min("rollout_weight_min", &bounded, mask)?;
        let bounded = mask.select(&bounded)?;
        if !weight.normalize {
            return Ok(bounded);
        }
        let mean = (bounded.sum_all()? / mask.count(bounded.dtype())?.maximum(1.)?)?;
        bounded.broadcast_div(&mean.maximum(1e-8)?)
    }
}

impl RolloutFilter {
    /// 1 where a token passes, u8 `[B, T]`.
    fn passes(&self, d: &Tensor, old: &Tensor, rollout: &Tensor, mask: &Mask) -> Result<Tensor> {
        let statistic = mask.select(&match self.statistic {
            FilterStatistic::LogRatio => d.clone(),
            FilterStatistic::ProbabilityDifference => (old.exp()? - rollout.exp()?)?,
            FilterStatistic::K1 => d.neg()?,
            FilterStatistic::K2 => (d.sqr()? * 0.5)?,
            FilterStatistic::K3 => k3(d)?,
        })?;
        let statistic = match self.level {
            FilterLevel::Token => statistic,
            FilterLevel::Segment => ImportanceLevel::Segment.log_ratio(&statistic, mask)?,
            FilterLevel::SequenceMean => ImportanceLevel::Sequence.log_ratio(&statistic, mask)?,
            FilterLevel::SequenceSum => {
                ImportanceLevel::SequenceProduct.log_ratio(&statistic, mask)?
            }
            FilterLevel::SequenceMax => {
                let lowest = (statistic.zeros_like()? + f64::NEG_INFINITY)?;
                mask.selected()
                    .where_cond(&statistic, &lowest)?
                    .max_keepdim(D::Minus1)?
                    .broadcast_as(d.shape())?
                    .contiguous()?
            }
        };
        let mut passes = mask.selected().clone();
        if let Some(max) = self.max {
            passes = (passes * statistic.le(max)?)?;
        }
        if let Some(min) = self.min {
            passes = (passes * statistic.ge(min)?)?;
        }
        passes.to_dtype(DType::U8)
    }
}

fn check_order(name: &str, min: Option<f64>, max: Option<f64>) -> Result<()> {
    if let (Some(min), Some(max)) = (min, max)
        && min > max
    {
        bail!("{name}: min {min} is above max {max}");
    }
    Ok(())
}
