//! Estimators of the Kullback-Leibler divergence of a policy from a reference.

mod controller;

pub use controller::KlController;

use candle_core::{D, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::arithmetic_dtype;
use crate::rewards::finite_mask;

/// What one sampled token says about KL(policy || reference), with `d = log_probs - ref_log_probs`.
///
/// k1, k2 and k3 are the names of <http://joschu.net/blog/kl-approx.html>; in brackets the names in verl and ROLL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `d` (`kl`): unbiased; as a loss its expected gradient is 0.
    #[serde(alias = "kl")]
    K1,
    /// `d^2 / 2` (`mse`): its gradient is that of the divergence on policy.
    #[serde(alias = "mse")]
    K2,
    /// `exp(-d) + d - 1` (`low_var_kl`): unbiased and never negative.
    #[default]
    #[serde(alias = "low_var_kl")]
    K3,
    /// `|d|`.
    Abs,
}

/// The gradient that an estimate carries.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlGradient {
    /// That of the estimator.
    #[default]
    Direct,
    /// `d`, the gradient of k2, which is the unbiased one on policy (`k1+` and `k3+` in verl).
    StraightThrough,
    /// `w * d` with the constant `w = min(exp(log_probs - old_log_probs), max)`: unbiased when the samples are from the
    /// old policy (OpenRLHF). Needs `old_log_probs`.
    ImportanceWeighted {
        /// The largest weight.
        max: f64,
    },
}

/// An estimate of the divergence for each token, with its gradient.
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
#[serde(default, deny_unknown_fields)]
pub struct Kl {
    /// Which estimate.
    pub estimator: KlEstimator,
    /// Which gradient.
    pub gradient: KlGradient,
    /// `d` is clamped to plus and minus this before it is exponentiated; beyond it the gradient of the estimator is 0. The
    /// other gradients keep a `d` beyond it, as in verl, unless it is infinite: there they are 0 too.
    pub log_ratio_clamp: Option<f64>,
    /// The estimate is clamped to plus and minus this. It takes the gradient away where the policy is far from the
    /// reference, so it is off by default; verl, ROLL and OpenRLHF have 10.
    pub value_clamp: Option<f64>,
}

impl Default for Kl {
    fn default() -> Self {
        Self::new(KlEstimator::default())
    }
}

impl Kl {
    /// An estimator with its own gradient and the log-ratio clamped to 20, which keeps `exp` finite.
    pub fn new(estimator: KlEstimator) -> Self {
        Self {
            estimator,
            gradient: KlGradient::Direct,
            log_ratio_clamp: Some(20.),
            value_clamp: None,
        }
    }

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        let max = match self.gradient {
            KlGradient::ImportanceWeighted { max } => Some(max),
            _ => None,
        };
        for (name, value) in [
            ("log_ratio_clamp", self.log_ratio_clamp),
            ("value_clamp", self.value_clamp),
            ("importance_weighted.max", max),
        ] {
            if let Some(x) = value
                && !(x > 0. && x.is_finite())
            {
                bail!("kl.{name}: {x}, must be positive and finite");
            }
        }
        Ok(())
    }

    /// The estimate for each token, in f32 (f64 for f64 inputs), of the shape of `log_probs`; `ref_log_probs` has the
    /// same shape. `old_log_probs` is used by [`KlGradient::ImportanceWeighted`] only.
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
        let settled = self.settled(&log_ratio)?;
        let slope = match self.gradient {
            KlGradient::Direct => return Ok(value),
            KlGradient::StraightThrough => settled.detach(),
            KlGradient::ImportanceWeighted { max } => {
                let Some(old) = old_log_probs else {
                    bail!("old_log_probs: absent, must be given for an importance-weighted KL");
                };
                let drift = (&log_probs.detach() - same_as("old_log_probs", old)?.detach())?;
                let weight = drift.minimum(max.ln())?.exp()?;
                (settled.detach() * weight)?
            }
        };
        // 0 with the derivative 1; the square of a large log-ratio would be infinite.
        let carrier = (&settled - settled.detach())?;
        value.detach() + (slope * carrier)?
    }

    /// The log-ratio, clamped where it is not finite.
    fn settled(&self, log_ratio: &Tensor) -> Result<Tensor> {
        match self.log_ratio_clamp {
            Some(c) => {
                finite_mask(&log_ratio.detach())?.where_cond(log_ratio, &log_ratio.clamp(-c, c)?)
            }
            None => Ok(log_ratio.clone()),
        }
    }

    fn value(&self, log_ratio: &Tensor) -> Result<Tensor> {
        let d = match self.log_ratio_clamp {
            Some(c) => log_ratio.clamp(-c, c)?,
            None => log_ratio.clone(),
        };
        let value = match self.estimator {
            KlEstimator::K1 => d,
            KlEstimator::K2 => (d.sqr()? * 0.5)?,
            KlEstimator::K3 => ((d.neg()?.exp()? + d)? - 1.)?,
            KlEstimator::Abs => {
                // Candle's |x| has the derivative 1 at 0; it is 0 here.
                let sign = d.detach().sign()?;
                (d * sign)?
            }
        };
        match self.value_clamp {
            Some(c) => value.clamp(-c, c),
            None => Ok(value),
        }
    }

    /// The exact divergence at each position of log-distributions `[.., V]`: the sum over the vocabulary of
    /// `exp(log_p) * (log_p - log_q)`, of shape `[..]`. Entries of minus infinity in `log_dist` are outside the
    /// distribution.
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
