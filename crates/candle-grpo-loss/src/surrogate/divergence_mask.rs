//! A trust region in the token's own probability.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::token_loss::{both, either, not, without};
use super::{SurrogateInputs, TokenLoss, TokenLosses};
use crate::divergence::binary_kl;
use candle_grpo_core::validate::{non_negative, positive};

/// Distance between the sampled token's probabilities: q under the old policy and p under the
/// policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Divergence {
    /// `|p - q|`, the binary total variation. The default.
    #[default]
    TotalVariation,
    /// `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, the binary KL.
    BinaryKl,
}

/// Tokens that a [`DivergenceMask`] drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DropIf {
    /// The move exceeds the bound in the advantage's direction: `high` upward for A > 0, `low`
    /// downward for A < 0. The default.
    #[default]
    WithAdvantage,
    /// The move exceeds the bound for its own direction, whatever A's sign (`ipo` in prime-rl).
    Outside,
    /// The move exceeds `low` downward, whatever A's sign (`ref_kl` in prime-rl).
    Below,
}

/// The loss value for a [`DivergenceMask`]. The gradient is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MaskedValue {
    /// `-w A log_prob` (DPPO, verl). The default.
    #[default]
    LogProb,
    /// `-w A` (prime-rl).
    Ratio,
}

/// `-w A log_prob` with the detached weight `w = min(r, ratio_max)`, and 0 where the token's
/// probability has moved too far (DPPO, <https://arxiv.org/abs/2602.04879>).
///
/// By default, too far means more than `high` upward for A > 0, or more than `low` downward for A
/// < 0.
#[doc(alias = "DPPO")]
#[doc(alias = "IPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DivergenceMask {
    /// Distance. Default `total_variation`.
    pub divergence: Divergence,
    /// Tokens that are dropped. Default `with_advantage`.
    pub drop_if: DropIf,
    /// Loss value. Default `log_prob`.
    pub value: MaskedValue,
    /// Downward bound. Default 0.2.
    pub low: f64,
    /// Upward bound. Default 0.2.
    pub high: f64,
    /// Upper bound for the weight. If absent, the weight is unbounded, as in prime-rl. Default 20.
    pub ratio_max: Option<f64>,
}

impl Default for DivergenceMask {
    fn default() -> Self {
        Self {
            divergence: Divergence::default(),
            drop_if: DropIf::WithAdvantage,
            value: MaskedValue::LogProb,
            low: 0.2,
            high: 0.2,
            ratio_max: Some(20.),
        }
    }
}

impl TokenLoss for DivergenceMask {
    fn validate(&self) -> Result<()> {
        non_negative("divergence_mask.low", self.low)?;
        non_negative("divergence_mask.high", self.high)?;
        if let Some(max) = self.ratio_max {
            positive("divergence_mask.ratio_max", max)?;
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let p = inputs.log_probs.detach().exp()?;
        let q = inputs.old_log_probs.exp()?;
        let distance = match self.divergence {
            Divergence::TotalVariation => (&p - &q)?.abs()?,
            Divergence::BinaryKl => binary_kl(&q, &p)?,
        };
        let mut high = both(&p.gt(&q)?, &distance.gt(self.high)?)?;
        let mut low = both(&p.lt(&q)?, &distance.gt(self.low)?)?;
        match self.drop_if {
            DropIf::WithAdvantage => {
                high = both(&high, &inputs.advantages.gt(0.)?)?;
                low = both(&low, &inputs.advantages.lt(0.)?)?;
            }
            DropIf::Outside => {}
            DropIf::Below => high = high.zeros_like()?,
        }
        let dropped = either(&high, &low)?;
        let ratio = inputs.log_ratio.detach().exp()?;
        let (weight, bounded) = match self.ratio_max {
            Some(max) => (ratio.minimum(max)?, both(&ratio.gt(max)?, &not(&dropped)?)?),
            None => (ratio.clone(), dropped.zeros_like()?),
        };
        // A dropped token's weight may overflow.
        let weight = without(&dropped, &weight)?;
        let loss = match self.value {
            MaskedValue::LogProb => inputs.weighted_policy_gradient(&weight)?,
            MaskedValue::Ratio => {
                // 1, with the log-prob's derivative.
                let carrier = ((inputs.log_probs - inputs.log_probs.detach())? + 1.)?;
                ((weight * inputs.advantages)? * carrier)?.neg()?
            }
        };
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
