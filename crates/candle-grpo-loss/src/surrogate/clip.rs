//! The clipped surrogate of PPO.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, both, either};
use crate::limits::{check_not_negative, check_positive};

/// `-min(r A, clip(r, 1 - low, 1 + high) A)` with r the ratio and A the advantage
/// (PPO, <https://arxiv.org/abs/1707.06347>).
///
/// `high > low` is the clip-higher of DAPO (<https://arxiv.org/abs/2503.14476>).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Clip {
    /// How far below 1 the ratio may go: from 0 to 1.
    pub low: f64,
    /// How far above 1 the ratio may go.
    pub high: f64,
    /// Where the advantage is negative, the loss is at most `-dual_clip * A` (<https://arxiv.org/abs/1912.09729>). An
    /// absolute ratio above `1 + high`: 3.0 in verl, 1.4 in ROLL (which writes it as `1 + 2 * pg_clip`).
    pub dual_clip: Option<f64>,
    /// The largest ratio of the unclipped term (TRL's `delta`, <https://arxiv.org/abs/2505.07291>). Above `1 + high` it is
    /// the same as `dual_clip`; below, it acts on positive advantages too.
    pub delta: Option<f64>,
}

impl Default for Clip {
    fn default() -> Self {
        Self::symmetric(0.2)
    }
}

impl Clip {
    /// The same width on both sides.
    pub fn symmetric(epsilon: f64) -> Self {
        Self::asymmetric(epsilon, epsilon)
    }

    /// A width for each side.
    pub fn asymmetric(low: f64, high: f64) -> Self {
        Self {
            low,
            high,
            dual_clip: None,
            delta: None,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        if !(0. ..=1.).contains(&self.low) {
            bail!("clip.low: {}, must be from 0 to 1", self.low);
        }
        check_not_negative("clip.high", self.high)?;
        if let Some(c) = self.dual_clip
            && !(c > 1. + self.high && c.is_finite())
        {
            bail!(
                "clip.dual_clip: {c}, is an absolute ratio and must be above 1 + high = {}",
                1. + self.high
            );
        }
        match self.delta {
            Some(delta) => check_positive("clip.delta", delta),
            None => Ok(()),
        }
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let advantages = inputs.advantages;

        // Which branch a token takes is a constant, so it is decided without a graph, and a token on a bound gets the
        // whole gradient of its branch instead of half of each.
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
        // Where the branch is a constant the ratio may overflow, and its gradient with it.
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
