//! The geometric mean of clipped ratios.

use candle_core::{D, Result};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, both, either};
use crate::limits::check_not_negative;

/// `-A_i exp(mean_t d~)` for each sequence, with `d~` the log-ratio of a token clipped to `[-low, high]` where that makes
/// the loss larger, and `A_i` the mean advantage of the sequence (GMPO, <https://arxiv.org/abs/2507.20673>).
///
/// Bounds are in log space; the paper has 0.4. The loss is that of a sequence, so it wants a mean over sequences:
/// [`crate::Aggregation::SeqMeanTokenMean`]. Importance weights enter the mean.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GeometricMean {
    /// How far below 0 the log-ratio may go.
    pub low: f64,
    /// How far above 0 the log-ratio may go.
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

impl GeometricMean {
    pub(super) fn validate(&self) -> Result<()> {
        check_not_negative("geometric_mean.low", self.low)?;
        check_not_negative("geometric_mean.high", self.high)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let d = inputs.token_log_ratio;
        let value = d.detach();
        let not_negative = inputs.advantages.ge(0.)?;
        let high = both(&value.gt(self.high)?, &not_negative)?;
        let low = both(&value.lt(-self.low)?, &inputs.advantages.lt(0.)?)?;
        let clipped = either(&high, &low)?;
        let d = clipped.where_cond(&value.clamp(-self.low, self.high)?, d)?;

        let lengths = inputs.mask.lengths(d.dtype())?.maximum(1.)?;
        let mut log_ratio = (d.sum_keepdim(D::Minus1)? / &lengths)?;
        if let Some(weights) = inputs.importance_weights {
            // A token whose weight is 0 was rejected: it takes no part in the mean, and does not make it 0.
            let logs = weights
                .gt(0.)?
                .where_cond(weights, &weights.ones_like()?)?
                .log()?;
            log_ratio = (log_ratio + (logs.sum_keepdim(D::Minus1)? / &lengths)?)?;
        }
        let advantage = (inputs.advantages.sum_keepdim(D::Minus1)? / &lengths)?;
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
}
