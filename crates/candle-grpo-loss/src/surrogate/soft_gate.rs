//! A smooth gate in place of the clip.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, by_sign};
use crate::limits::check_positive;

/// `-A (4 / tau) sigmoid(tau (r - 1))` with tau by the sign of the advantage (SAPO, <https://arxiv.org/abs/2511.20347>):
/// at a ratio of 1 the gradient is that of the policy gradient, and it fades on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoftGate {
    /// How fast the gradient fades where the advantage is positive.
    pub tau_pos: f64,
    /// How fast it fades elsewhere.
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

impl SoftGate {
    pub(super) fn validate(&self) -> Result<()> {
        check_positive("soft_gate.tau_pos", self.tau_pos)?;
        check_positive("soft_gate.tau_neg", self.tau_neg)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let tau = by_sign(inputs.advantages, self.tau_pos, self.tau_neg)?;
        let distance = ((inputs.log_ratio.exp()? - 1.)? * &tau)?;
        // sigmoid(x) is (1 + tanh(x / 2)) / 2, which overflows on neither side.
        let gate = (((distance * 0.5)?.tanh()? + 1.)? * 2.)?;
        Ok(TokenLosses {
            loss: ((gate / tau)? * inputs.advantages)?.neg()?,
            flags: Vec::new(),
        })
    }
}
