//! The plain policy gradient.

use candle_core::Result;

use super::{SurrogateInputs, TokenLoss, TokenLosses};

/// `-A log_prob` (REINFORCE; GPG, <https://arxiv.org/abs/2504.02546>).
#[doc(alias = "REINFORCE")]
#[doc(alias = "GPG")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyGradient;

impl TokenLoss for PolicyGradient {
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let loss = (inputs.advantages * inputs.log_probs)?.neg()?;
        Ok(TokenLosses::new(loss))
    }
}
