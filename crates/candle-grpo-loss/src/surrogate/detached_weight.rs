//! The policy gradient weighted by a bounded ratio.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, both, either, not, weighted_policy_gradient};

/// `-sg[clip(r, ratio_min, ratio_max)] A log_prob`: every token keeps a gradient, however far its ratio has moved.
///
/// Bounds are absolute ratios. CISPO (<https://arxiv.org/abs/2506.13585>) has an upper bound only; truncated importance
/// sampling (<https://arxiv.org/abs/2503.14286>) has 1. verl and ROLL write CISPO's bounds as distances from 1, TRL and
/// Liger as the upper ratio itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DetachedWeight {
    /// The smallest weight.
    pub ratio_min: Option<f64>,
    /// The largest weight, at least 1.
    pub ratio_max: Option<f64>,
    /// Whether tokens that PPO would clip are left out (`cispo_use_unified_mask` in ROLL).
    pub unified_mask: Option<UnifiedMask>,
}

/// The bounds of the clip whose tokens are left out: a distance from 1 on each side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnifiedMask {
    /// How far below 1 the ratio of a token with a negative advantage may go.
    pub low: f64,
    /// How far above 1 the ratio of a token with a positive advantage may go.
    pub high: f64,
}

impl Default for DetachedWeight {
    fn default() -> Self {
        Self::at_most(5.)
    }
}

impl DetachedWeight {
    /// No lower bound, and this upper one.
    pub fn at_most(ratio_max: f64) -> Self {
        Self {
            ratio_min: None,
            ratio_max: Some(ratio_max),
            unified_mask: None,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        if let Some(min) = self.ratio_min
            && !(0. ..=1.).contains(&min)
        {
            bail!("detached_weight.ratio_min: {min}, is an absolute ratio and must be from 0 to 1");
        }
        if let Some(max) = self.ratio_max
            && !(max >= 1. && max.is_finite())
        {
            bail!(
                "detached_weight.ratio_max: {max}, is an absolute ratio and must be at least 1 (a distance of 0.2 from 1 is 1.2)"
            );
        }
        if let Some(mask) = self.unified_mask
            && !(mask.low >= 0. && mask.high >= 0.)
        {
            bail!("detached_weight.unified_mask: {mask:?}, bounds must be at least 0");
        }
        Ok(())
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let ratio = inputs.log_ratio.detach().exp()?;
        let none = ratio.zeros_like()?.ne(0.)?;
        let mut weight = ratio.clone();
        let (mut below, mut above) = (none.clone(), none);
        if let Some(min) = self.ratio_min {
            below = ratio.lt(min)?;
            weight = weight.maximum(min)?;
        }
        if let Some(max) = self.ratio_max {
            above = ratio.gt(max)?;
            weight = weight.minimum(max)?;
        }
        let mut flags = vec![
            ("clip_fraction_low", below.clone()),
            ("clip_fraction_high", above.clone()),
            ("clip_fraction", either(&below, &above)?),
        ];
        let mut loss = weighted_policy_gradient(inputs, &weight)?;
        if let Some(bounds) = self.unified_mask {
            let dropped = bounds.dropped(&ratio, inputs.advantages)?;
            loss = not(&dropped)?.where_cond(&loss, &loss.zeros_like()?)?;
            flags.push(("dropped_fraction", dropped));
        }
        Ok(TokenLosses { loss, flags })
    }
}

impl UnifiedMask {
    /// 1 where PPO would clip.
    fn dropped(&self, ratio: &Tensor, advantages: &Tensor) -> Result<Tensor> {
        let high = both(&ratio.gt(1. + self.high)?, &advantages.gt(0.)?)?;
        let low = both(&ratio.lt(1. - self.low)?, &advantages.lt(0.)?)?;
        either(&high, &low)
    }
}
