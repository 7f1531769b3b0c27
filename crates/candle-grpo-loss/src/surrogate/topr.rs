//! Tapered off-policy REINFORCE.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::token_loss::{both, full_like, not};
use super::{SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::validate::{finite, non_negative};

/// Condition for a positive sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PositiveIf {
    /// An advantage above 0.
    AdvantagePositive,
    /// A score, before any shaping, above this value. Requires [`crate::PolicyBatch::scores`].
    ScoreAbove(f64),
}

/// `-w A log_prob` with the detached weight w (TOPR, <https://arxiv.org/abs/2503.14286>).
///
/// For positive samples, w is `positive_weight`, as in supervised learning. For the others, it is
/// `negative_weight * min(r, 1)`.
#[doc(alias = "TOPR")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Topr {
    /// Weight for positive samples. Default 1.
    pub positive_weight: f64,
    /// Weight factor for the other samples. Default 1.
    pub negative_weight: f64,
    /// Condition for a positive sample. Default `advantage_positive`.
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

impl TokenLoss for Topr {
    fn validate(&self) -> Result<()> {
        non_negative("topr.positive_weight", self.positive_weight)?;
        non_negative("topr.negative_weight", self.negative_weight)?;
        if let PositiveIf::ScoreAbove(x) = self.positive_if {
            finite("topr.positive_if.score_above", x)?;
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let ratio = inputs.log_ratio.detach().exp()?;
        let positive = self.positive(inputs)?;
        let tapered = (ratio.minimum(1.)? * self.negative_weight)?;
        let whole = full_like(&ratio, self.positive_weight)?;
        let weight = positive.where_cond(&whole, &tapered)?;
        let clipped = both(&ratio.gt(1.)?, &not(&positive)?)?;
        Ok(TokenLosses {
            loss: inputs.weighted_policy_gradient(&weight)?,
            flags: vec![("clip_fraction", clipped), ("positive_fraction", positive)],
        })
    }

    fn needs(&self) -> Inputs {
        let by_score = matches!(self.positive_if, PositiveIf::ScoreAbove(_));
        Inputs::when(by_score, Input::Scores)
    }
}

impl Topr {
    /// Returns 1 for tokens in positive samples, u8.
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
