//! Tapered off-policy REINFORCE.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, weighted_policy_gradient};
use crate::limits::check_not_negative;

/// Which samples count as positive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositiveIf {
    /// Those with an advantage above 0.
    AdvantagePositive,
    /// Those whose score, before any shaping, is above this. Needs scores.
    ScoreAbove(f64),
}

/// `-w A log_prob` with the constant w: `positive_weight` for positive samples, else `negative_weight * min(r, 1)`
/// (TOPR, <https://arxiv.org/abs/2503.14286>): positive samples as in supervised learning, negative ones only as far as
/// the policy still gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Topr {
    /// The weight of positive samples.
    pub positive_weight: f64,
    /// What multiplies the weight of the others.
    pub negative_weight: f64,
    /// Which samples are positive.
    pub positive_if: PositiveIf,
}

impl Default for Topr {
    fn default() -> Self {
        Self {
            positive_weight: 1.,
            negative_weight: 1.,
            positive_if: PositiveIf::AdvantagePositive,
        }
    }
}

impl Topr {
    pub(super) fn validate(&self) -> Result<()> {
        check_not_negative("topr.positive_weight", self.positive_weight)?;
        check_not_negative("topr.negative_weight", self.negative_weight)?;
        match self.positive_if {
            PositiveIf::ScoreAbove(x) if !x.is_finite() => {
                bail!("topr.positive_if.score_above: {x}, must be finite")
            }
            _ => Ok(()),
        }
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let ratio = inputs.log_ratio.detach().exp()?;
        let positive = self.positive(inputs)?;
        let tapered = (ratio.minimum(1.)? * self.negative_weight)?;
        let whole = (ratio.zeros_like()? + self.positive_weight)?;
        let weight = positive.where_cond(&whole, &tapered)?;
        let clipped = (ratio.gt(1.)? * positive.eq(0u8)?)?;
        Ok(TokenLosses {
            loss: weighted_policy_gradient(inputs, &weight)?,
            flags: vec![("clip_fraction", clipped), ("positive_fraction", positive)],
        })
    }

    fn positive(&self, inputs: &SurrogateInputs) -> Result<Tensor> {
        match (self.positive_if, inputs.scores) {
            (PositiveIf::AdvantagePositive, _) => inputs.advantages.gt(0.),
            (PositiveIf::ScoreAbove(threshold), Some(scores)) => scores.gt(threshold),
            (PositiveIf::ScoreAbove(_), None) => {
                bail!("scores: absent, topr.positive_if.score_above needs the score of each sample")
            }
        }
    }
}
