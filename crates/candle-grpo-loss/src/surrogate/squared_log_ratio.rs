//! The policy gradient with a squared penalty.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::validate::non_negative;

/// `-A log_prob + (coef / 2) d^2` with the log-ratio d: a penalty instead of the clip.
///
/// Kimi k1.5 (<https://arxiv.org/abs/2501.12599>) calls the coefficient tau, DRO
/// (<https://arxiv.org/abs/2405.19107>) calls it beta.
#[doc(alias = "Kimi")]
#[doc(alias = "DRO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SquaredLogRatio {
    /// Penalty coefficient. Default 0.1.
    pub coef: f64,
}

impl Default for SquaredLogRatio {
    fn default() -> Self {
        Self { coef: 0.1 }
    }
}

impl TokenLoss for SquaredLogRatio {
    fn validate(&self) -> Result<()> {
        non_negative("squared_log_ratio.coef", self.coef)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let gain = (inputs.advantages * inputs.log_probs)?;
        let penalty = (inputs.log_ratio.sqr()? * (0.5 * self.coef))?;
        Ok(TokenLosses::new((penalty - gain)?))
    }
}
