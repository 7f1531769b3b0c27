//! The policy gradient with a squared penalty.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses};
use crate::limits::check_not_negative;

/// `-A log_prob + (coef / 2) d^2` with d the log-ratio: the policy gradient, held back by a penalty instead of a clip
/// (Kimi k1.5, <https://arxiv.org/abs/2501.12599>, which calls the coefficient tau; DRO,
/// <https://arxiv.org/abs/2405.19107>, which calls it beta).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SquaredLogRatio {
    /// The weight of the penalty.
    pub coef: f64,
}

impl Default for SquaredLogRatio {
    fn default() -> Self {
        Self { coef: 0.1 }
    }
}

impl SquaredLogRatio {
    pub(super) fn validate(&self) -> Result<()> {
        check_not_negative("squared_log_ratio.coef", self.coef)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let gain = (inputs.advantages * inputs.log_probs)?;
        let penalty = (inputs.log_ratio.sqr()? * (0.5 * self.coef))?;
        Ok(TokenLosses {
            loss: (penalty - gain)?,
            flags: Vec::new(),
        })
    }
}
