//! A smooth gate instead of the clip.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::validate::positive;

/// `-A (4 / tau) sigmoid(tau (r - 1))`, where the advantage's sign selects tau (SAPO,
/// <https://arxiv.org/abs/2511.20347>).
///
/// At ratio 1, the gradient is the policy gradient. It decays on both sides.
#[doc(alias = "SAPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SoftGate {
    /// Gradient decay where the advantage is positive. Default 1.
    pub tau_pos: f64,
    /// Gradient decay elsewhere. Default 1.05.
    pub tau_neg: f64,
}

impl Default for SoftGate {
    fn default() -> Self {
        Self {
            tau_pos: 1.,
            tau_neg: 1.05,
        }
    }
}

impl TokenLoss for SoftGate {
    fn validate(&self) -> Result<()> {
        positive("soft_gate.tau_pos", self.tau_pos)?;
        positive("soft_gate.tau_neg", self.tau_neg)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let tau = inputs.by_sign(self.tau_pos, self.tau_neg)?;
        let distance = ((inputs.log_ratio.exp()? - 1.)? * &tau)?;
        // sigmoid(x) = (1 + tanh(x / 2)) / 2 does not overflow.
        let gate = (((distance * 0.5)?.tanh()? + 1.)? * 2.)?;
        Ok(TokenLosses::new(
            ((gate / tau)? * inputs.advantages)?.neg()?,
        ))
    }
}
