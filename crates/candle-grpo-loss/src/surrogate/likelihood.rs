//! Likelihood for tokens from another source.

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLoss, TokenLosses};

/// `-log_prob`, whatever the advantage. It is the loss for tokens that another source wrote, such
/// as demonstrations and observations from an environment (`ce` in prime-rl).
///
/// Usually, put such tokens into their own batch with their own denominators, and add the losses.
#[doc(alias = "SFT")]
#[doc(alias = "CHORD")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Likelihood {
    /// Multiplies the loss by `sg[p (1 - p)]`, where p is the token's probability. Tokens that the
    /// policy is sure about then count less (CHORD-phi, <https://arxiv.org/abs/2508.11408>).
    ///
    /// A token with a probability near 0 has almost no gradient either. Default `false`.
    pub uncertainty_weight: bool,
}

impl Likelihood {
    /// Returns each token's loss factor, detached, in the shape of `log_probs`. Returns `None` if
    /// all factors are 1.
    ///
    /// # Errors
    ///
    /// Fails if a device operation fails.
    pub fn token_factors(&self, log_probs: &Tensor) -> Result<Option<Tensor>> {
        if !self.uncertainty_weight {
            return Ok(None);
        }
        let p = log_probs.detach().exp()?;
        Ok(Some((&p * (p.neg()? + 1.)?)?))
    }
}

impl TokenLoss for Likelihood {
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let loss = inputs.log_probs.neg()?;
        Ok(TokenLosses::new(
            match self.token_factors(inputs.log_probs)? {
                Some(factors) => (loss * factors)?,
                None => loss,
            },
        ))
    }
}
