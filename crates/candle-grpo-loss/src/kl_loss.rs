//! The KL term in the loss.

use candle_core::{Result, Tensor};
use candle_grpo_core::Kl;
use candle_grpo_core::kl::KlGradient;
use serde::{Deserialize, Serialize};

use candle_grpo_core::validate::{Name, check, non_negative};

/// Ratio that multiplies the KL estimate. It makes the gradient unbiased for samples from the old
/// policy (<https://arxiv.org/abs/2512.02556>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BiasCorrection {
    /// No ratio. The default.
    #[default]
    Off,
    /// The token's ratio.
    Token,
    /// The ratio at the loss's importance level, as in TRL (`use_bias_correction_kl`) and Liger.
    ImportanceLevel,
}

/// `coef * KL(policy || reference)`, added to each token's loss before aggregation.
///
/// Start without it. Add [`Self::k3`] with a coefficient near 0.001 if rewards are easy to game.
/// Watch the metric `kl`: if it keeps growing, the policy leaves the reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct KlLoss {
    /// Coefficient (`kl_coef`, `beta`).
    pub coef: f64,
    /// Estimator and its gradient. Default [`Kl::default`].
    #[serde(default)]
    pub kl: Kl,
    /// The policy's ratio to the old policy, which multiplies the estimate. Default `off`.
    #[serde(default)]
    pub bias_correction: BiasCorrection,
}

impl KlLoss {
    /// Creates a KL term with the k3 estimator and its own gradient, as in the GRPO paper.
    pub fn k3(coef: f64) -> Self {
        Self::new(coef, Kl::default())
    }

    /// Creates a KL term with k3's value and k2's gradient (`k3+` in verl).
    ///
    /// On-policy, k2's gradient equals that of the divergence. k3's gradient equals that of the
    /// reverse divergence (<http://joschu.net/blog/kl-approx.html>).
    pub fn unbiased(coef: f64) -> Self {
        let kl = Kl {
            gradient: KlGradient::StraightThrough,
            ..Kl::default()
        };
        Self::new(coef, kl)
    }

    /// Creates a KL term without bias correction.
    pub fn new(coef: f64, kl: Kl) -> Self {
        Self {
            coef,
            kl,
            bias_correction: BiasCorrection::Off,
        }
    }

    /// Checks the options for the loss `name`.
    pub(crate) fn validate(&self, name: &str) -> Result<()> {
        non_negative(&format!("{name}.coef"), self.coef)?;
        let valid =
            self.bias_correction == BiasCorrection::Off || self.kl.gradient == KlGradient::Direct;
        let must = "be off with a gradient other than direct, which is unbiased already";
        check(
            valid,
            &format!("{name}.bias_correction"),
            Name(&self.bias_correction),
            must,
        )?;
        let kl = self.kl.validate();
        // Paths in the first one already start with its name.
        match name {
            "kl" => kl?,
            _ => kl.map_err(|e| e.within(name))?,
        }
        Ok(())
    }

    /// Computes each token's estimate, without the coefficient.
    ///
    /// `token_log_ratio` is the token's log-ratio, `log_ratio` the one at the importance level.
    pub(crate) fn per_token(
        &self,
        log_probs: &Tensor,
        ref_log_probs: &Tensor,
        old_log_probs: &Tensor,
        token_log_ratio: &Tensor,
        log_ratio: &Tensor,
    ) -> Result<Tensor> {
        let kl = self
            .kl
            .per_token(log_probs, ref_log_probs, Some(old_log_probs))?;
        match self.bias_correction {
            BiasCorrection::Off => Ok(kl),
            BiasCorrection::Token => kl * token_log_ratio.exp()?,
            BiasCorrection::ImportanceLevel => kl * log_ratio.exp()?,
        }
    }
}
