//! A trust region in the probability of the token itself.

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, both, either, not, weighted_policy_gradient};
use crate::limits::{check_not_negative, check_positive};

/// How far the probability of the sampled token has moved, from q under the old policy to p.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// `|p - q|`, the total variation between "this token" and "another one".
    #[default]
    TotalVariation,
    /// `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, the KL between the two.
    BinaryKl,
}

/// `-sg[min(r, ratio_max)] A log_prob`, and 0 where the probability of the token has moved further than `high` (A > 0,
/// upwards) or `low` (A < 0, downwards) (DPPO, <https://arxiv.org/abs/2602.04879>).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DivergenceMask {
    /// The measure.
    pub divergence: Divergence,
    /// The bound where the advantage is negative.
    pub low: f64,
    /// The bound where the advantage is positive.
    pub high: f64,
    /// The largest weight.
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

impl DivergenceMask {
    pub(super) fn validate(&self) -> Result<()> {
        check_not_negative("divergence_mask.low", self.low)?;
        check_not_negative("divergence_mask.high", self.high)?;
        check_positive("divergence_mask.ratio_max", self.ratio_max)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
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
        let loss = weighted_policy_gradient(inputs, &ratio.minimum(self.ratio_max)?)?;
        Ok(TokenLosses {
            loss: not(&dropped)?.where_cond(&loss, &loss.zeros_like()?)?,
            flags: vec![
                ("clip_fraction_low", low),
                ("clip_fraction_high", high),
                ("clip_fraction", dropped),
                ("ratio_max_fraction", ratio.gt(self.ratio_max)?),
            ],
        })
    }
}

/// The KL between two coins, the probabilities kept off 0 and 1.
fn binary_kl(q: &Tensor, p: &Tensor) -> Result<Tensor> {
    let tiny = 1e-7;
    let (q, p) = (q.clamp(tiny, 1. - tiny)?, p.clamp(tiny, 1. - tiny)?);
    let complement = |x: &Tensor| -> Result<Tensor> { x.neg()? + 1. };
    let this = (&q * (q.log()? - p.log()?)?)?;
    let other = (complement(&q)? * (complement(&q)?.log()? - complement(&p)?.log()?)?)?;
    this + other
}
