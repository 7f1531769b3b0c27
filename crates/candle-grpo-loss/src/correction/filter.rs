//! Filters that reject tokens or sequences on which the two policies differ too much.

use candle_core::{D, DType, Result, Tensor};
use candle_grpo_core::validate::check;
use candle_grpo_core::{KlEstimator, Mask};
use serde::{Deserialize, Serialize};

use super::check_order;
use crate::divergence::{binary_kl, clamped_probability};
use crate::importance_level::ImportanceLevel;

/// Bounds, both inclusive, on a statistic of the difference between the two policies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutFilter {
    /// The bounded statistic.
    pub statistic: FilterStatistic,
    /// The level at which the statistic is taken.
    pub level: FilterLevel,
    /// The lower bound. Absent by default.
    #[serde(default)]
    pub min: Option<f64>,
    /// The upper bound. Absent by default.
    #[serde(default)]
    pub max: Option<f64>,
}

/// A statistic of one token, with `d = old_log_probs - rollout_log_probs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FilterStatistic {
    /// `d`. Bounds are logarithms of ratios; the mean over a sequence is the logarithm of the
    /// geometric mean of the ratios.
    LogRatio,
    /// `q - p` with `q = exp(old_log_probs)` and `p = exp(rollout_log_probs)`.
    ProbabilityDifference,
    /// `|q - p|`, the binary total variation, with both probabilities clamped to `[1e-6, 1 -
    /// 1e-6]`.
    #[doc(alias = "TV")]
    #[serde(alias = "tv")]
    AbsoluteProbabilityDifference,
    /// `p log(p / q) + (1 - p) log((1 - p) / (1 - q))`, with both probabilities clamped to `[1e-6,
    /// 1 - 1e-6]`.
    BinaryKl,
    /// `-d`; the mean estimates KL(rollout || old).
    K1,
    /// `d^2 / 2`.
    K2,
    /// `exp(d) - 1 - d`.
    K3,
    /// `exp(-d) - 1 + d`, k3 of the inverse ratio (AReaL's `kl_k3`).
    InverseK3,
}

/// The level of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FilterLevel {
    /// Each token on its own.
    Token,
    /// The mean over each run of consecutive tokens of the mask.
    Segment,
    /// The mean over the sequence. All tokens of a sequence pass, or none.
    SequenceMean,
    /// The sum over the sequence.
    SequenceSum,
    /// The maximum over the sequence.
    SequenceMax,
}

impl RolloutFilter {
    pub(super) fn validate(&self) -> Result<()> {
        let valid = self.min.is_some() || self.max.is_some();
        let value = format!("{self:?}");
        check(
            valid,
            "rollout_correction.filters",
            value,
            "have a bound: min or max",
        )?;
        check_order("rollout_correction.filters", self.min, self.max)
    }

    /// Returns 1 where a token passes, u8 `[B, T]`.
    pub(super) fn passes(
        &self,
        d: &Tensor,
        old: &Tensor,
        rollout: &Tensor,
        mask: &Mask,
    ) -> Result<Tensor> {
        let statistic = mask.select(&match self.statistic {
            FilterStatistic::LogRatio => d.clone(),
            FilterStatistic::ProbabilityDifference => (old.exp()? - rollout.exp()?)?,
            FilterStatistic::AbsoluteProbabilityDifference => (clamped_probability(&old.exp()?)?
                - clamped_probability(&rollout.exp()?)?)?
            .abs()?,
            FilterStatistic::BinaryKl => binary_kl(&rollout.exp()?, &old.exp()?)?,
            FilterStatistic::K1 => KlEstimator::K1.estimate(&d.neg()?)?,
            FilterStatistic::K2 => KlEstimator::K2.estimate(&d.neg()?)?,
            FilterStatistic::K3 => KlEstimator::K3.estimate(&d.neg()?)?,
            FilterStatistic::InverseK3 => KlEstimator::K3.estimate(d)?,
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
