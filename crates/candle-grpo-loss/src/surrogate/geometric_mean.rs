//! The geometric mean over clipped ratios.

use candle_core::{D, Result};
use serde::{Deserialize, Serialize};

use super::token_loss::{both, either};
use super::{LossLevel, SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::validate::non_negative;

/// `-A_i exp(mean_t d~)` for each sequence i (GMPO, <https://arxiv.org/abs/2507.20673>).
///
/// `d~` is a token's log-ratio, clipped to `[-low, high]` on the side where that increases the
/// loss. `A_i` is the sequence's mean advantage. Bounds are in log space; the paper uses 0.4.
///
/// There is one loss per sequence, so use [`crate::Aggregation::SeqMeanTokenMean`]. Importance
/// weights are factors in the geometric mean. With a policy mask, the mean is over its tokens.
#[doc(alias = "GMPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GeometricMean {
    /// Clip width below a log-ratio of 0. Default 0.4.
    pub low: f64,
    /// Clip width above a log-ratio of 0. Default 0.4.
    pub high: f64,
}

impl Default for GeometricMean {
    fn default() -> Self {
        Self {
            low: 0.4,
            high: 0.4,
        }
    }
}

impl TokenLoss for GeometricMean {
    fn validate(&self) -> Result<()> {
        non_negative("geometric_mean.low", self.low)?;
        non_negative("geometric_mean.high", self.high)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let d = inputs.token_log_ratio;
        let value = d.detach();
        let not_negative = inputs.advantages.ge(0.)?;
        let high = both(&value.gt(self.high)?, &not_negative)?;
        let low = both(&value.lt(-self.low)?, &inputs.advantages.lt(0.)?)?;
        let clipped = either(&high, &low)?;
        let d = clipped.where_cond(&value.clamp(-self.low, self.high)?, d)?;

        let lengths = inputs.mask.lengths(d.dtype())?.maximum(1.)?;
        let advantage = (inputs.advantages.sum_keepdim(D::Minus1)? / &lengths)?;
        let (d, lengths) = match inputs.policy_mask {
            Some(kept) => {
                let kept = inputs.mask.and(kept)?;
                (kept.select(&d)?, kept.lengths(d.dtype())?.maximum(1.)?)
            }
            None => (d, lengths),
        };
        let mut log_ratio = (d.sum_keepdim(D::Minus1)? / &lengths)?;
        if let Some(weights) = inputs.importance_weights {
            // A weight of 0 rejects its token, which then leaves the mean. The mean does not
            // become 0.
            let logs = weights
                .gt(0.)?
                .where_cond(weights, &weights.ones_like()?)?
                .log()?;
            let per_token = weights.dims() == value.dims();
            log_ratio = if per_token {
                let logs = match inputs.policy_mask {
                    Some(kept) => kept.where_cond(&logs, &logs.zeros_like()?)?,
                    None => logs,
                };
                (log_ratio + (logs.sum_keepdim(D::Minus1)? / &lengths)?)?
            } else {
                (log_ratio + logs)?
            };
        }
        let loss = (log_ratio.exp()? * advantage)?.neg()?;
        Ok(TokenLosses {
            loss: loss.broadcast_as(value.shape())?,
            flags: vec![
                ("clip_fraction_low", low),
                ("clip_fraction_high", high),
                ("clip_fraction", clipped),
            ],
        })
    }

    fn level(&self) -> LossLevel {
        LossLevel::Sequence
    }

    fn needs(&self) -> Inputs {
        [Input::ImportanceWeights, Input::PolicyMask].into()
    }
}
