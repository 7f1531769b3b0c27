//! Filters that reject tokens or sequences where the two policies differ too much.

use candle_core::{D, DType, Result, Tensor};
use candle_grpo_core::validate::check;
use candle_grpo_core::{KlEstimator, Mask};
use serde::{Deserialize, Serialize};

use super::check_order;
use crate::divergence::{binary_kl, clamped_probability};
use crate::importance_level::ImportanceLevel;

/// Inclusive bounds on a statistic that compares the two policies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RolloutFilter {
    /// Statistic that is bounded.
    pub statistic: FilterStatistic,
    /// Level at which the statistic is computed.
    pub level: FilterLevel,
    /// Lower bound. Absent by default.
    #[serde(default)]
    pub min: Option<f64>,
    /// Upper bound. Absent by default.
    #[serde(default)]
    pub max: Option<f64>,
}

/// A per-token statistic, with `d = old_log_probs - rollout_log_probs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FilterStatistic {
    /// `d`. Bounds are logarithms of ratios. A sequence mean is the logarithm of the geometric mean
    /// ratio.
    LogRatio,
    /// `q - p` with `q = exp(old_log_probs)` and `p = exp(rollout_log_probs)`.
    ProbabilityDifference,
    /// `|q - p|`, the binary total variation, with both probabilities clamped to `[1e-6, 1 -
    /// 1e-6]`.
    #[doc(alias = "TV")]
    #[serde(alias = "tv")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["tv"])))]
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
    /// `exp(-d) - 1 + d`: k3 with the inverse ratio (AReaL's `kl_k3`).
    InverseK3,
}

/// Level at which a statistic is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FilterLevel {
    /// Each token by itself.
    Token,
    /// Mean over each run of consecutive masked-in tokens.
    Segment,
    /// Mean over the sequence. Either all its tokens pass, or none.
    SequenceMean,
    /// Sum over the sequence.
    SequenceSum,
    /// Maximum over the sequence.
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
