//! The KL term of the loss.

use candle_core::{Result, Tensor};
use candle_grpo_core::Kl;
use candle_grpo_core::kl::KlGradient;
use serde::{Deserialize, Serialize};

use candle_grpo_core::validate::{Name, check, non_negative};

/// The ratio that multiplies the estimate, which makes its gradient unbiased for samples of the old
/// policy (<https://arxiv.org/abs/2512.02556>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BiasCorrection {
    /// No ratio. The default.
    #[default]
    Off,
    /// The ratio of the token.
    Token,
    /// The ratio at the importance level of the loss, as in TRL (`use_bias_correction_kl`) and
    /// Liger.
    ImportanceLevel,
}

/// `coef * KL(policy || reference)`, added to the loss of each token before aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlLoss {
    /// The coefficient of the KL term (`kl_coef`, `beta`).
    pub coef: f64,
    /// The estimator and its gradient. Default [`Kl::default`].
    #[serde(default)]
    pub kl: Kl,
    /// The ratio of the policy to the old policy that multiplies the estimate. Default `off`.
    #[serde(default)]
    pub bias_correction: BiasCorrection,
}

impl KlLoss {
    /// The k3 estimator with its own gradient, as in the GRPO paper.
    pub fn k3(coef: f64) -> Self {
        Self::new(coef, Kl::default())
    }

    /// The value of k3 with the gradient of k2 (`k3+` in verl).
    ///
    /// On policy, the gradient of k2 is that of the divergence; the gradient of k3 is that of the
    /// reverse divergence (<http://joschu.net/blog/kl-approx.html>).
    pub fn unbiased(coef: f64) -> Self {
        let kl = Kl {
            gradient: KlGradient::StraightThrough,
            ..Kl::default()
        };
        Self::new(coef, kl)
    }

    /// An estimator without bias correction.
    pub fn new(coef: f64, kl: Kl) -> Self {
        Self {
            coef,
            kl,
            bias_correction: BiasCorrection::Off,
        }
    }

    /// Checks the options of the loss `name`.
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
        // The path of the first one starts with its name already.
        match name {
            "kl" => kl?,
            _ => kl.map_err(|e| e.within(name))?,
        }
        Ok(())
    }

    /// Computes the estimate for each token, without the coefficient.
    ///
    /// `token_log_ratio` is the log-ratio of the token, `log_ratio` that of the importance level.
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
