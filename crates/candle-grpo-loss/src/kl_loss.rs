//! The KL term of the loss.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::Kl;
use serde::{Deserialize, Serialize};

/// `coef * KL(policy || reference)`, added to the loss of each token before aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlLoss {
    /// What multiplies the estimate (`kl_coef`, `beta`).
    pub coef: f64,
    /// Which estimate, with which gradient.
    #[serde(default)]
    pub kl: Kl,
    /// Whether the estimate is multiplied by the ratio of the policy to the old policy, which makes its gradient
    /// unbiased for samples of the old policy (<https://arxiv.org/abs/2512.02556>; `use_bias_correction_kl` in TRL).
    #[serde(default)]
    pub bias_correction: bool,
}

impl KlLoss {
    /// The k3 estimator with its own gradient, as in the GRPO paper.
    pub fn k3(coef: f64) -> Self {
        Self {
            coef,
            kl: Kl::default(),
            bias_correction: false,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if !(self.coef >= 0. && self.coef.is_finite()) {
            bail!("kl.coef: {}, must be at least 0 and finite", self.coef);
        }
        self.kl.validate()
    }

    /// The estimate for each token, without the coefficient; `log_ratio` is that of the importance level.
    pub(crate) fn per_token(
        &self,
        log_probs: &Tensor,
        ref_log_probs: &Tensor,
        old_log_probs: &Tensor,
        log_ratio: &Tensor,
    ) -> Result<Tensor> {
        let kl = self
            .kl
            .per_token(log_probs, ref_log_probs, Some(old_log_probs))?;
        if self.bias_correction {
            kl * log_ratio.exp()?
        } else {
            Ok(kl)
        }
    }
}
