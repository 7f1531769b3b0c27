//! PPO's clipped surrogate.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::token_loss::{both, either};
use super::{SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::validate::{check, non_negative, positive, unit_interval};

/// PPO's clipped surrogate: `-min(r A, clip(r, 1 - low, 1 + high) A)` with ratio r and advantage A
/// (<https://arxiv.org/abs/1707.06347>).
///
/// Start with [`Clip::symmetric`]`(0.2)`. If entropy collapses, raise `high`: `high > low` is
/// DAPO's clip-higher (<https://arxiv.org/abs/2503.14476>). If `clip_fraction` is large, lower the
/// learning rate or make fewer updates per batch.
#[doc(alias = "PPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Clip {
    /// Clip width below a ratio of 1, from 0 to 1. Default 0.2.
    pub low: f64,
    /// Clip width above a ratio of 1. Default 0.2.
    pub high: f64,
    /// A finite ratio c above 1: with a negative advantage, the loss is at most `-c A`
    /// (<https://arxiv.org/abs/1912.09729>). It does not depend on `high`, which has no effect
    /// there.
    ///
    /// verl uses 3.0 and ROLL `1 + 2 * pg_clip`. Absent by default.
    pub dual_clip: Option<f64>,
    /// Upper bound for the ratio in the unclipped term (TRL's `delta`,
    /// <https://arxiv.org/abs/2505.07291>).
    ///
    /// At or above `1 + high` it equals `dual_clip`. Below, it also acts on positive advantages.
    /// Absent by default.
    pub delta: Option<f64>,
}

impl Default for Clip {
    fn default() -> Self {
        Self::symmetric(0.2)
    }
}

impl Clip {
    /// Creates a clip with the same width on both sides.
    pub fn symmetric(epsilon: f64) -> Self {
        Self::asymmetric(epsilon, epsilon)
    }

    /// Creates a clip with a width for each side: 0.2 and 0.28 clip ratios to the range from 0.8 to
    /// 1.28.
    pub fn asymmetric(low: f64, high: f64) -> Self {
        Self {
            low,
            high,
            dual_clip: None,
            delta: None,
        }
    }
}

impl TokenLoss for Clip {
    fn validate(&self) -> Result<()> {
        unit_interval("clip.low", self.low)?;
        non_negative("clip.high", self.high)?;
        if let Some(c) = self.dual_clip {
            let valid = c > 1. && c.is_finite();
            check(valid, "clip.dual_clip", c, "be a finite ratio above 1")?;
        }
        if let Some(delta) = self.delta {
            positive("clip.delta", delta)?;
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let advantages = inputs.advantages;

        // A token's branch is a constant, which is selected without a graph. A token on a bound
        // gets its branch's whole gradient; `maximum` would give half of each.
        let value = inputs.log_ratio.detach().exp()?;
        let limited = match self.delta {
            Some(delta) => value.minimum(delta)?,
            None => value.clone(),
        };
        let limited_loss = (&limited * advantages)?.neg()?;
        let clipped_loss = (value.clamp(1. - self.low, 1. + self.high)? * advantages)?.neg()?;
        let takes_clipped = clipped_loss.gt(&limited_loss)?;
        let outside = either(&value.lt(1. - self.low)?, &value.gt(1. + self.high)?)?;
        let clipped = both(&takes_clipped, &outside)?;
        let mut constant = clipped_loss.maximum(&limited_loss)?;
        let mut is_constant = takes_clipped.where_cond(&outside, &value.ne(&limited)?)?;

        let negative = advantages.lt(0.)?;
        let mut flags = vec![
            ("clip_fraction_low", both(&clipped, &negative)?),
            ("clip_fraction_high", both(&clipped, &advantages.gt(0.)?)?),
        ];
        if let Some(c) = self.dual_clip {
            let ceiling = (advantages * -c)?;
            let above = both(&negative, &constant.gt(&ceiling)?)?;
            constant = above.where_cond(&ceiling, &constant)?;
            is_constant = either(&is_constant, &above)?;
            flags.push(("dual_clip_fraction", above));
        }
        flags.push(("clip_fraction", clipped));
        // Where the branch is a constant, the ratio may overflow, and so may its gradient.
        let log_ratio = inputs.log_ratio;
        let ratio = is_constant
            .where_cond(&log_ratio.zeros_like()?, log_ratio)?
            .exp()?;
        let unclipped = (ratio * advantages)?.neg()?;
        Ok(TokenLosses {
            loss: is_constant.where_cond(&constant, &unclipped)?,
            flags,
        })
    }
}
