//! The plain policy gradient.

use candle_core::Result;

use super::{SurrogateInputs, TokenLosses};

pub(super) fn per_token(inputs: &SurrogateInputs) -> Result<TokenLosses> {
    Ok(TokenLosses {
        loss: (inputs.advantages * inputs.log_probs)?.neg()?,
        flags: Vec::new(),
    })
}
