//! Weights and filters for samples from another engine or an older policy.
//!
//! Your trainer and the sampling engine compute slightly different probabilities for the same
//! token. Watch `rollout_kl`: if it stays near 0, you need no correction. Otherwise, start with
//! [`RolloutCorrection::token_is`] and a maximum weight of 2. Add a filter if a few sequences
//! differ by far.

mod filter;
mod mismatch;
mod presets;
mod proximal;
mod second_moment;

use candle_core::{D, DType, Result, Tensor};
use candle_grpo_core::dtype::{arithmetic_dtype, statistics_dtype};
use candle_grpo_core::{KlEstimator, Mask, Metrics};
use serde::{Deserialize, Serialize};

pub use filter::{FilterLevel, FilterStatistic, RolloutFilter};
pub use proximal::ProximalPolicy;

use crate::importance_level::ImportanceLevel;
use candle_grpo_core::validate::{check, non_negative, positive};

/// Corrects for the difference between the old policy, as the trainer computes it, and the policy
/// that sampled.
///
/// The log-ratio is `d = old_log_probs - rollout_log_probs`. Compute the correction once over a
/// whole step, because normalization and filter counts belong to the step.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::RolloutCorrection;
/// use candle_grpo_loss::correction::ImportanceWeight;
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
/// let rollout = correction.compute(&old_log_probs, &rollout_log_probs, &response_mask)?;
/// let weights = rollout.weights.expect("a weight is configured").to_vec2::<f32>()?;
/// assert!((weights[0][0] - 1.105).abs() < 1e-3 && weights[0][2] == 2.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RolloutCorrection {
    /// Weight for the policy term. If absent, it is 1. Absent by default.
    pub weight: Option<ImportanceWeight>,
    /// Filters. A token is kept if it passes all of them. Empty by default.
    pub filters: Vec<RolloutFilter>,
    /// Upper bound for the mean `d^2` over the kept tokens (M2PO,
    /// <https://arxiv.org/abs/2510.01161>). As few tokens as possible are rejected, those with the
    /// largest `d^2` first. Here, `d` is not clamped. Absent by default.
    pub second_moment: Option<f64>,
    /// The bound c: `d` and its sum over a sequence are clamped to `[-c, c]` before `exp`.
    /// Default 20.
    pub log_ratio_clamp: Option<f64>,
}

impl Default for RolloutCorrection {
    fn default() -> Self {
        Self {
            weight: None,
            filters: Vec::new(),
            second_moment: None,
            log_ratio_clamp: Some(20.),
        }
    }
}

/// The importance weight `exp(d)` at some level, within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ImportanceWeight {
    /// Level for the log-ratio. Default `token`.
    pub level: ImportanceLevel,
    /// Lower bound. Absent by default.
    pub min: Option<f64>,
    /// Upper bound. Default 2.
    pub max: Option<f64>,
    /// Treatment for a weight outside the bounds. Default `truncate`.
    #[serde(alias = "outside")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["outside"])))]
    pub out_of_bounds: OutOfBounds,
    /// Divides the weights by their mean. Weights per token are averaged over tokens, weights per
    /// sequence over sequences that have tokens. Default `false`.
    pub normalize: bool,
}

impl Default for ImportanceWeight {
    fn default() -> Self {
        Self::truncated(2.)
    }
}

impl ImportanceWeight {
    /// Creates a per-token weight that is at most `max` (truncated importance sampling).
    pub fn truncated(max: f64) -> Self {
        Self {
            level: ImportanceLevel::Token,
            min: None,
            max: Some(max),
            out_of_bounds: OutOfBounds::Truncate,
            normalize: false,
        }
    }

    /// Creates a per-token weight that is 0 outside the bounds (IcePop,
    /// <https://arxiv.org/abs/2510.18855>).
    pub fn icepop(min: f64, max: f64) -> Self {
        Self {
            min: Some(min),
            out_of_bounds: OutOfBounds::Mask,
            ..Self::truncated(max)
        }
    }
}

/// Treatment for a weight outside its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OutOfBounds {
    /// The weight becomes the bound. The default.
    #[default]
    Truncate,
    /// The weight becomes 0.
    Mask,
}

/// Output from [`RolloutCorrection::compute`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RolloutWeights {
    /// Weights for the policy term, to pass as [`crate::PolicyBatch::importance_weights`].
    ///
    /// `[B, T]`, or `[B, 1]` if the level is a whole sequence.
    pub weights: Option<Tensor>,
    /// The mask's tokens that pass the filters, u8 `[B, T]`.
    ///
    /// Pass them as [`crate::PolicyBatch::policy_mask`], and rejected tokens leave only the policy
    /// term. Pass them as the response mask, and they also leave the denominators.
    pub kept: Tensor,
    /// Metrics over the response mask:
    ///
    /// | name | meaning |
    /// | --- | --- |
    /// | `rollout_kl`, `rollout_kl_k3` | mean `-d`, and mean `exp(d) - 1 - d` |
    /// | `rollout_weight_mean`, `_max`, `_min` | mean, maximum and minimum weight |
    /// | `rollout_weight_square` | mean squared weight; `mean^2 / square` is the effective sample fraction |
    /// | `rollout_truncated_fraction` | fraction of tokens whose weight is outside its bounds |
    /// | `rollout_weight_normalizer` | mean that `normalize` divided by |
    /// | `rollout_rejected_fraction` | fraction of tokens that the filters reject |
    /// | `rollout_rejected_sequence_fraction` | fraction of sequences with a rejected token, among sequences with tokens |
    /// | `mismatch_training_ppl`, `mismatch_rollout_ppl` | `exp(-mean log-prob)`, averaged over sequences; `_log_ppl` averages the exponents |
    /// | `mismatch_log_ppl_diff`, `_abs_diff`, `_diff_max`, `_diff_min`, `mismatch_ppl_ratio` | difference between the two exponents; `mismatch_ppl_ratio` averages its `exp` |
    /// | `mismatch_chi2_token`, `mismatch_chi2_sequence` | mean `exp(d)^2 - 1`; for a sequence, d is summed first |
    pub metrics: Metrics,
}

impl RolloutCorrection {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        if let Some(c) = self.log_ratio_clamp {
            positive("rollout_correction.log_ratio_clamp", c)?;
        }
        if let Some(threshold) = self.second_moment {
            positive("rollout_correction.second_moment", threshold)?;
        }
        if let Some(weight) = &self.weight {
            if let Some(min) = weight.min {
                non_negative("rollout_correction.weight.min", min)?;
            }
            if let Some(max) = weight.max {
                positive("rollout_correction.weight.max", max)?;
            }
            check_order("rollout_correction.weight", weight.min, weight.max)?;
            let valid = weight.level != ImportanceLevel::SequenceToken;
            let must = "be another level: a weight has no gradient";
            check(
                valid,
                "rollout_correction.weight.level",
                "sequence_token",
                must,
            )?;
        }
        self.filters.iter().try_for_each(RolloutFilter::validate)
    }

    /// Returns whether the correction rejects tokens.
    pub fn rejects(&self) -> bool {
        !self.filters.is_empty() || self.second_moment.is_some()
    }

    /// Computes weights and kept tokens from the log-probs `[B, T]` under the old policy and from
    /// the sampling engine.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid or a shape differs from that of `response_mask`.
    pub fn compute(
        &self,
        old_log_probs: &Tensor,
        rollout_log_probs: &Tensor,
        response_mask: &Tensor,
    ) -> Result<RolloutWeights> {
        self.validate()?;
        let mask = Mask::new(response_mask)?;
        let dtype = arithmetic_dtype(old_log_probs.dtype());
        let clean = |name: &str, x: &Tensor| -> Result<Tensor> {
            mask.check(name, x)?;
            mask.select(&x.detach().to_dtype(dtype)?)
        };
        let old = clean("old_log_probs", old_log_probs)?;
        let rollout = clean("rollout_log_probs", rollout_log_probs)?;
        let d = self.clamped(&(&old - &rollout)?)?;

        let mut metrics = Metrics::new();
        let k1 = d.neg()?;
        metrics.push_masked_mean("rollout_kl", &k1, &mask)?;
        metrics.push_masked_mean("rollout_kl_k3", &KlEstimator::K3.estimate(&k1)?, &mask)?;
        let weights = match &self.weight {
            None => None,
            Some(weight) => Some(self.weights(weight, &d, &mask, &mut metrics)?),
        };
        let mut kept = mask.selected().clone();
        for filter in &self.filters {
            kept = (kept * filter.passes(&d, &old, &rollout, &mask)?)?;
        }
        if let Some(threshold) = self.second_moment {
            kept = (kept * second_moment::below(threshold, &(&old - &rollout)?, &mask)?)?;
        }
        let rejected = mask.select(&kept.eq(0u8)?)?;
        metrics.push_masked_mean("rollout_rejected_fraction", &rejected, &mask)?;
        let of_sequences = rejected.max_keepdim(D::Minus1)?;
        let sequences = Mask::new(&mask.selected().max_keepdim(D::Minus1)?)?;
        metrics.push_masked_mean(
            "rollout_rejected_sequence_fraction",
            &of_sequences,
            &sequences,
        )?;
        let product = self.clamped(&d.sum_keepdim(D::Minus1)?)?;
        mismatch::push(&mut metrics, [&old, &rollout], &d, &product, &mask)?;
        Ok(RolloutWeights {
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
        if weight.out_of_bounds == OutOfBounds::Mask {
            bounded = outside.where_cond(&bounded.zeros_like()?, &bounded)?;
        }
        metrics.push_masked_mean("rollout_truncated_fraction", &outside, mask)?;
        metrics.push_masked_mean("rollout_weight_mean", &bounded, mask)?;
        metrics.push_masked_mean("rollout_weight_square", &bounded.sqr()?, mask)?;
        metrics.push_masked_max("rollout_weight_max", &bounded, mask)?;
        metrics.push_masked_min("rollout_weight_min", &bounded, mask)?;
        let selected = mask.select(&bounded)?;
        let weights = match weight.level {
            ImportanceLevel::Sequence | ImportanceLevel::SequenceProduct => {
                bounded.narrow(D::Minus1, 0, 1)?.contiguous()?
            }
            _ => selected.clone(),
        };
        if !weight.normalize {
            return Ok(weights);
        }
        // One number per weight: over tokens or over sequences.
        let counted = if weights.dims() == mask.selected().dims() {
            mask.selected().clone()
        } else {
            mask.selected().max_keepdim(D::Minus1)?
        };
        let statistics = statistics_dtype(weights.device());
        let sum = counted
            .where_cond(&weights, &weights.zeros_like()?)?
            .to_dtype(statistics)?
            .sum_all()?;
        let count = counted
            .to_dtype(DType::F32)?
            .to_dtype(statistics)?
            .sum_all()?;
        let mean = (sum / count.maximum(1.)?)?;
        metrics.push_mean("rollout_weight_normalizer", &mean, &mean.ones_like()?)?;
        let mean = mean.to_dtype(weights.dtype())?;
        weights.broadcast_div(&mean.maximum(1e-8)?)
    }
}

fn check_order(name: &str, min: Option<f64>, max: Option<f64>) -> Result<()> {
    if let (Some(min), Some(max)) = (min, max) {
        let must = format!("be at most {name}.max, {max}");
        check(min <= max, &format!("{name}.min"), min, &must)?;
    }
    Ok(())
}
