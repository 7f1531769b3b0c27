//! Divergence estimators from log-probs, and their gradients.

use candle_core::{D, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::arithmetic_dtype;
use crate::rewards::finite_mask;
use crate::validate::{self, Checked};

/// Estimator for KL(policy || reference) from one sampled token, with
/// `d = log_probs - ref_log_probs`.
///
/// Use `K3` unless you reproduce a paper: it is unbiased and never negative, so a metric that grows
/// means that the policy moves away from the reference. The names k1, k2 and k3 come from
/// <http://joschu.net/blog/kl-approx.html>. verl's and ROLL's names are in brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KlEstimator {
    /// `d` (`kl`). Unbiased, but as a loss its expected gradient is 0.
    #[serde(alias = "kl")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["kl"])))]
    K1,
    /// `d^2 / 2` (`mse`). On-policy, its gradient equals that of the divergence.
    #[serde(alias = "mse")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["mse"])))]
    K2,
    /// `exp(-d) + d - 1` (`low_var_kl`). Unbiased and never negative. The default.
    #[default]
    #[serde(alias = "low_var_kl")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["low_var_kl"])))]
    K3,
    /// `|d|`.
    Abs,
}

impl KlEstimator {
    /// Computes the estimate from `d = log_probs - ref_log_probs`, in any shape. Differentiable.
    ///
    /// # Errors
    ///
    /// Fails if Candle lacks the operation for the dtype of `log_ratio`.
    pub fn estimate(self, log_ratio: &Tensor) -> Result<Tensor> {
        let d = log_ratio;
        match self {
            Self::K1 => Ok(d.clone()),
            Self::K2 => d.sqr()? * 0.5,
            // Subtracting 1 first makes the difference exact near 0.
            Self::K3 => (d.neg()?.exp()? - 1.)? + d,
            // Candle's derivative of |x| at 0 is 1; here it is 0.
            Self::Abs => d * d.detach().sign()?,
        }
    }
}

/// Gradient for a KL estimate.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum KlGradient {
    /// The estimator's own gradient. The default.
    #[default]
    Direct,
    /// `d`, the k2 gradient, which is unbiased on-policy (`k1+` and `k3+` in verl).
    StraightThrough,
    /// `w * d` with the constant `w = min(exp(log_probs - old_log_probs), max)`. Unbiased for
    /// samples from the old policy (OpenRLHF). Needs `old_log_probs`.
    ImportanceWeighted {
        /// Largest weight.
        max: f64,
    },
}

/// A per-token KL estimator, with its gradient and clamps.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::{Kl, KlEstimator};
///
/// let log_probs = Tensor::new(&[-1f32, -2.], &Device::Cpu)?;
/// let ref_log_probs = Tensor::new(&[-1.5f32, -1.], &Device::Cpu)?;
/// let k3 = Kl::new(KlEstimator::K3).per_token(&log_probs, &ref_log_probs, None)?;
/// let k3 = k3.to_vec1::<f32>()?;
/// assert!((k3[0] - 0.106531).abs() < 1e-6 && (k3[1] - 0.718282).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Kl {
    /// Estimator. Default `k3`.
    pub estimator: KlEstimator,
    /// Gradient. Default `direct`.
    pub gradient: KlGradient,
    /// Bound for `d`, positive and negative, before `exp`. Beyond it, the estimator's own gradient
    /// is 0. The other gradients use the unclamped `d`, as in verl, and are 0 only where it is
    /// infinite. Default 20.
    pub log_ratio_clamp: Option<f64>,
    /// Bound for the estimate, positive and negative. It removes the gradient where the policy is
    /// far from the reference. verl, ROLL and OpenRLHF use 10. Absent by default.
    pub value_clamp: Option<f64>,
}

impl Default for Kl {
    fn default() -> Self {
        Self::new(KlEstimator::default())
    }
}

impl Kl {
    /// Creates an estimator with its own gradient. The log-ratio is clamped to 20, which keeps
    /// `exp` finite.
    pub fn new(estimator: KlEstimator) -> Self {
        Self {
            estimator,
            gradient: KlGradient::Direct,
            log_ratio_clamp: Some(20.),
            value_clamp: None,
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        let max = match self.gradient {
            KlGradient::ImportanceWeighted { max } => Some(max),
            _ => None,
        };
        for (field, value) in [
            ("kl.log_ratio_clamp", self.log_ratio_clamp),
            ("kl.value_clamp", self.value_clamp),
            ("kl.importance_weighted.max", max),
        ] {
            if let Some(x) = value {
                validate::positive(field, x)?;
            }
        }
        Ok(())
    }

    /// Computes the estimate for each token, in f32 (f64 for f64 inputs).
    ///
    /// All tensors have the same shape. [`KlGradient::ImportanceWeighted`] needs `old_log_probs`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if shapes differ, or if `old_log_probs` is absent but needed.
    pub fn per_token(
        &self,
        log_probs: &Tensor,
        ref_log_probs: &Tensor,
        old_log_probs: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.validate()?;
        let log_probs = log_probs.to_dtype(arithmetic_dtype(log_probs.dtype()))?;
        let same_as = |name: &str, x: &Tensor| {
            if x.dims() != log_probs.dims() {
                bail!(
                    "{name}: shape {:?}, must be that of log_probs, {:?}",
                    x.dims(),
                    log_probs.dims()
                );
            }
            x.to_dtype(log_probs.dtype())
        };
        let log_ratio = (&log_probs - same_as("ref_log_probs", ref_log_probs)?)?;
        let value = self.value(&log_ratio)?;
        let bounded = self.clamp_infinite(&log_ratio)?;
        let slope = match self.gradient {
            KlGradient::Direct => return Ok(value),
            KlGradient::StraightThrough => bounded.detach(),
            KlGradient::ImportanceWeighted { max } => {
                let Some(old) = old_log_probs else {
                    bail!("old_log_probs: absent, must be given for an importance-weighted KL");
                };
                let drift = (&log_probs.detach() - same_as("old_log_probs", old)?.detach())?;
                let weight = drift.minimum(max.ln())?.exp()?;
                (bounded.detach() * weight)?
            }
        };
        // 0, with derivative 1. Squaring a large log-ratio would give infinity.
        let carrier = (&bounded - bounded.detach())?;
        value.detach() + (slope * carrier)?
    }

    /// Returns the log-ratio, clamped only where it is not finite.
    fn clamp_infinite(&self, log_ratio: &Tensor) -> Result<Tensor> {
        match self.log_ratio_clamp {
            Some(c) => {
                finite_mask(&log_ratio.detach())?.where_cond(log_ratio, &log_ratio.clamp(-c, c)?)
            }
            None => Ok(log_ratio.clone()),
        }
    }

    fn value(&self, log_ratio: &Tensor) -> Result<Tensor> {
        let log_ratio = match self.log_ratio_clamp {
            Some(c) => log_ratio.clamp(-c, c)?,
            None => log_ratio.clone(),
        };
        let value = self.estimator.estimate(&log_ratio)?;
        match self.value_clamp {
            Some(c) => value.clamp(-c, c),
            None => Ok(value),
        }
    }

    /// Computes the exact divergence between log-distributions `[.., V]`:
    /// `exp(log_p) * (log_p - log_q)` summed over the vocabulary, with shape `[..]`. An entry in
    /// `log_dist` that is minus infinity has probability 0.
    ///
    /// # Errors
    ///
    /// Fails if the shapes differ.
    pub fn full(log_dist: &Tensor, ref_log_dist: &Tensor) -> Result<Tensor> {
        if log_dist.dims() != ref_log_dist.dims() {
            bail!(
                "ref_log_dist: shape {:?}, must be that of log_dist, {:?}",
                ref_log_dist.dims(),
                log_dist.dims()
            );
        }
        let p = log_dist.to_dtype(arithmetic_dtype(log_dist.dtype()))?;
        let q = ref_log_dist.to_dtype(p.dtype())?;
        let inside = p.detach().ne(f64::NEG_INFINITY)?;
        let zeros = p.zeros_like()?;
        let p = inside.where_cond(&p, &zeros)?;
        let q = inside.where_cond(&q, &zeros)?;
        let terms = (p.exp()? * (&p - &q)?)?;
        inside.where_cond(&terms, &zeros)?.sum(D::Minus1)
    }
}
