//! The policy gradient weighted by a bounded ratio.

use candle_core::{Result, Tensor};
use candle_grpo_core::validate::{check, non_negative, positive};
use serde::{Deserialize, Serialize};

use super::token_loss::{both, either, without};
use super::{SurrogateInputs, TokenLoss, TokenLosses};

/// `-sg[clip(r, ratio_min, ratio_max)] A log_prob`: every token keeps a gradient, however far its
/// ratio has moved.
///
/// Choose it over [`Clip`](super::Clip) if rare but important tokens should keep learning. Bounds
/// are absolute ratios. CISPO (<https://arxiv.org/abs/2506.13585>) has an upper bound only.
/// Truncated importance sampling (<https://arxiv.org/abs/2503.14286>) has the upper bound 1. verl
/// and ROLL write CISPO's bounds as distances from 1; TRL and Liger write the upper ratio itself.
#[doc(alias = "CISPO")]
#[doc(alias = "TIS")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DetachedWeight {
    /// Lower bound for the weight, from 0 to 1. Absent by default.
    pub ratio_min: Option<f64>,
    /// Upper bound for the weight, at least 1 unless `allow_max_below_one`. Default 5.
    pub ratio_max: Option<f64>,
    /// Accepts a `ratio_max` below 1, which scales down on-policy tokens too.
    ///
    /// Such a bound is usually a clip width: `ratio_max: 0.2` where 1.2 is meant. TRL's default is
    /// 0.2. Default `false`.
    pub allow_max_below_one: bool,
    /// Drops the tokens that PPO would clip (`cispo_use_unified_mask` in ROLL). Absent by default.
    pub unified_mask: Option<UnifiedMask>,
}

/// Clip widths for the tokens that [`DetachedWeight`] drops: distances from a ratio of 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct UnifiedMask {
    /// Width below 1, for tokens with a negative advantage.
    pub low: f64,
    /// Width above 1, for tokens with a positive advantage.
    pub high: f64,
}

impl Default for DetachedWeight {
    fn default() -> Self {
        Self::at_most(5.)
    }
}

impl DetachedWeight {
    /// Creates a weight with an upper bound and no lower bound.
    pub fn at_most(ratio_max: f64) -> Self {
        Self {
            ratio_min: None,
            ratio_max: Some(ratio_max),
            allow_max_below_one: false,
            unified_mask: None,
        }
    }
}

impl TokenLoss for DetachedWeight {
    fn validate(&self) -> Result<()> {
        if let Some(min) = self.ratio_min {
            let valid = (0. ..=1.).contains(&min);
            let must = "be an absolute ratio from 0 to 1";
            check(valid, "detached_weight.ratio_min", min, must)?;
        }
        if let Some(max) = self.ratio_max {
            positive("detached_weight.ratio_max", max)?;
            let valid = max >= 1. || self.allow_max_below_one;
            let must = "be an absolute ratio of at least 1: a distance of 0.2 from 1 is 1.2 (or set allow_max_below_one)";
            check(valid, "detached_weight.ratio_max", max, must)?;
        }
        if let Some(mask) = self.unified_mask {
            non_negative("detached_weight.unified_mask.low", mask.low)?;
            non_negative("detached_weight.unified_mask.high", mask.high)?;
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
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
        let mut loss = inputs.weighted_policy_gradient(&weight)?;
        if let Some(bounds) = self.unified_mask {
            let dropped = bounds.dropped(&ratio, inputs.advantages)?;
            loss = without(&dropped, &loss)?;
            flags.push(("dropped_fraction", dropped));
        }
        Ok(TokenLosses { loss, flags })
    }
}

impl UnifiedMask {
    /// Returns 1 where PPO would clip.
    fn dropped(&self, ratio: &Tensor, advantages: &Tensor) -> Result<Tensor> {
        let high = both(&ratio.gt(1. + self.high)?, &advantages.gt(0.)?)?;
        let low = both(&ratio.lt(1. - self.low)?, &advantages.lt(0.)?)?;
        either(&high, &low)
    }
}
