//! The old policy without a forward pass.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::validate;
use serde::{Deserialize, Serialize};

/// Replaces the old policy by an interpolation between the policy that sampled a token and the
/// current one (AReaL).
///
/// Use it for asynchronous training, where a forward pass under the old policy costs too much. The
/// current policy's share `a` depends on the weight versions, because the old policy is the one
/// before the last update. For a token sampled with version `v`, and current version `n`,
/// `a = (n - 1 - v) / (n - v)`. A token from the current version has `a = 0`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::correction::ProximalPolicy;
///
/// let log_probs = Tensor::new(&[[-1f32, -1.]], &Device::Cpu)?;
/// let rollout_log_probs = Tensor::new(&[[-2f32, -2.]], &Device::Cpu)?;
/// let versions = Tensor::new(&[[3i64, 2]], &Device::Cpu)?;
/// let old = ProximalPolicy::LogLinear.log_probs(&log_probs, &rollout_log_probs, &versions, 4)?;
/// assert_eq!(old.to_vec2::<f32>()?, [[-2., -1.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum ProximalPolicy {
    /// `(1 - a) roll + a lp`. The default.
    #[default]
    LogLinear,
    /// `log((1 - a) exp(roll) + a exp(lp) + floor)`.
    Linear {
        /// Probability that is added, 1e-10 in AReaL. Default 0.
        #[serde(default)]
        floor: f64,
    },
}

impl ProximalPolicy {
    /// Computes the old policy's log-probs `[B, T]`, without a gradient.
    ///
    /// `versions` `[B, T]` are the weight versions that sampled the tokens. A negative version
    /// marks a token that the policy did not sample.
    ///
    /// # Errors
    ///
    /// Fails if the shapes differ or the floor is negative.
    pub fn log_probs(
        self,
        log_probs: &Tensor,
        rollout_log_probs: &Tensor,
        versions: &Tensor,
        current_version: i64,
    ) -> Result<Tensor> {
        let dtype = arithmetic_dtype(log_probs.dtype());
        let clean = |name: &str, x: &Tensor| {
            if x.dims() != log_probs.dims() {
                bail!(
                    "{name}: shape {:?}, must be that of log_probs, {:?}",
                    x.dims(),
                    log_probs.dims()
                );
            }
            x.detach().to_dtype(dtype)
        };
        let current = log_probs.detach().to_dtype(dtype)?;
        let rollout = clean("rollout_log_probs", rollout_log_probs)?;
        let versions = clean("versions", versions)?;
        // Number of updates since a token was sampled.
        let age = (versions.neg()? + current_version as f64)?;
        let stale = (age.gt(0.)? * versions.ge(0.)?)?;
        let age = stale.where_cond(&age, &age.ones_like()?)?;
        let share = ((&age - 1.)? / age)?;
        match self {
            Self::LogLinear => {
                let mean = ((&current * &share)? + (&rollout * (share.neg()? + 1.)?)?)?;
                // A share of 0 ignores a log-prob that is minus infinity.
                share.gt(0.)?.where_cond(&mean, &rollout)
            }
            Self::Linear { floor } => {
                validate::non_negative("linear.floor", floor)?;
                let a = (&rollout + (share.neg()? + 1.)?.log()?)?;
                let b = (&current + share.log()?)?;
                let largest = a.maximum(&b)?;
                let sum = ((a - &largest)?.exp()? + (b - &largest)?.exp()?)?;
                if floor == 0. {
                    return largest + sum.log()?;
                }
                let largest_of_all = largest.maximum(floor.ln())?;
                let scaled = (sum * (&largest - &largest_of_all)?.exp()?)?;
                let floor = (largest_of_all.neg()? + floor.ln())?.exp()?;
                largest_of_all + (scaled + floor)?.log()?
            }
        }
    }
}
