//! The KL term of the loss.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Kl, KlGradient};
use serde::{Deserialize, Serialize};

use crate::limits::check_not_negative;

/// Whether, and with which ratio, the estimate is multiplied, which makes its gradient unbiased for samples of the old
/// policy (<https://arxiv.org/abs/2512.02556>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasCorrection {
    /// It is not.
    #[default]
    Off,
    /// The ratio of the token.
    Token,
    /// The ratio at the importance level of the loss, as in TRL (`use_bias_correction_kl`) and Liger.
    ImportanceLevel,
}

/// `coef * KL(policy || reference)`, added to the loss of each token before aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlLoss {
    /// What multiplies the estimate (`kl_coef`, `beta`).
    pub coef: f64,
    /// Which estimate, with which gradient.
    #[serde(default)]
    pub kl: Kl,
    /// Whether the estimate is multiplied by the ratio of the policy to the old policy.
    #[serde(default)]
    pub bias_correction: BiasCorrection,
}

impl KlLoss {
    /// The k3 estimator with its own gradient, as in the GRPO paper.
    pub fn k3(coef: f64) -> Self {
        Self::new(coef, Kl::default())
    }

    /// An estimator without bias correction.
    pub fn new(coef: f64, kl: Kl) -> Self {
        Self {
            coef,
            kl,
            bias_correction: BiasCorrection::Off,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_not_negative("kl.coef", self.coef)?;
        if self.bias_correction != BiasCorrection::Off && self.kl.gradient != KlGradient::Direct {
            bail!(
                "kl.bias_correction: {:?} with the gradient {:?}, which is unbiased already; must be off, or the gradient direct",
                self.bias_correction,
                self.kl.gradient
            );
        }
        self.kl.validate()
    }

    /// The estimate for each token, without the coefficient; the log-ratios are that of the token and that of the
    /// importance level.
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
