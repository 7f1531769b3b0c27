//! A trust region in the probability of the token itself.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::token_loss::{both, either, not, without};
use super::{SurrogateInputs, TokenLoss, TokenLosses};
use crate::divergence::binary_kl;
use candle_grpo_core::validate::{non_negative, positive};

/// The distance between the probability q of the sampled token under the old policy and p under the
/// policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// `|p - q|`, the binary total variation.
    #[default]
    TotalVariation,
    /// `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, the binary KL.
    BinaryKl,
}

/// `-sg[min(r, ratio_max)] A log_prob`, and 0 where the probability of the token has moved too far
/// (DPPO, <https://arxiv.org/abs/2602.04879>).
///
/// Too far is a distance above `high` upwards for A > 0, or above `low` downwards for A < 0.
#[doc(alias = "DPPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DivergenceMask {
    /// The distance.
    pub divergence: Divergence,
    /// The bound where the advantage is negative.
    pub low: f64,
    /// The bound where the advantage is positive.
    pub high: f64,
    /// The upper bound of the weight.
    pub ratio_max: f64,
}

impl Default for DivergenceMask {
    fn default() -> Self {
        Self {
            divergence: Divergence::default(),
            low: 0.2,
            high: 0.2,
            ratio_max: 20.,
        }
    }
}

impl TokenLoss for DivergenceMask {
    fn validate(&self) -> Result<()> {
        non_negative("divergence_mask.low", self.low)?;
        non_negative("divergence_mask.high", self.high)?;
        positive("divergence_mask.ratio_max", self.ratio_max)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let p = inputs.log_probs.detach().exp()?;
        let q = inputs.old_log_probs.exp()?;
        let distance = match self.divergence {
            Divergence::TotalVariation => (&p - &q)?.abs()?,
            Divergence::BinaryKl => binary_kl(&q, &p)?,
        };
        let up = both(&p.gt(&q)?, &inputs.advantages.gt(0.)?)?;
        let down = both(&p.lt(&q)?, &inputs.advantages.lt(0.)?)?;
        let high = both(&up, &distance.gt(self.high)?)?;
        let low = both(&down, &distance.gt(self.low)?)?;
        let dropped = either(&high, &low)?;
        let ratio = inputs.log_ratio.detach().exp()?;
        let loss = inputs.weighted_policy_gradient(&ratio.minimum(self.ratio_max)?)?;
        let bounded = both(&ratio.gt(self.ratio_max)?, &not(&dropped)?)?;
        Ok(TokenLosses {
            loss: without(&dropped, &loss)?,
            flags: vec![
                ("clip_fraction_low", low),
                ("clip_fraction_high", high),
                ("clip_fraction", dropped),
                ("ratio_max_fraction", bounded),
            ],
        })
    }
}
