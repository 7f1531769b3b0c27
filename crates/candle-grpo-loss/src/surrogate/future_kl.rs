//! The clip, weighted by how far later tokens drift.

use candle_core::{Result, Tensor};
use candle_grpo_core::Invalid;
use candle_grpo_core::advantage::reverse_recurrence;
use serde::{Deserialize, Serialize};

use super::token_loss::{both, full_like, not};
use super::{Clip, SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::validate::{non_negative, positive};

/// Bound for a weight's exponent without a clip: `exp` stays finite in f32.
const EXPONENT_MAX: f64 = 80.;

/// Weight range for a token that the safety threshold holds back.
const SAFE_WEIGHTS: (f64, f64) = (0.8, 1.);

/// `w` times [`Clip`], with the detached weight `w = exp(f)` and the future KL
/// `f_t = sum_(k >= t) 2^(-(k - t) / half_life) d_k` (FIPO, <https://arxiv.org/abs/2603.19835>;
/// ms-swift).
///
/// A token gets a larger weight if the update makes later tokens more likely. Tokens outside the
/// mask count as steps but add nothing. Tokens whose ratio is above [`Clip::delta`] add nothing.
///
/// # Metrics
///
/// `future_kl` is the mean f, and `influence_weight` the mean w. `safety_fraction` is the share of
/// tokens that the threshold holds back.
#[doc(alias = "FIPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct FutureKl {
    /// Clip. Default `Clip::asymmetric(0.2, 0.28)`.
    pub clip: Clip,
    /// Distance in tokens over which an influence halves. Default 32.
    pub half_life: f64,
    /// Bound for w's distance from 1. If absent, w is unbounded. Default 0.2.
    pub weight_clip: Option<f64>,
    /// Keeps w at 1 or above, so that no token counts less. Default `true`.
    pub high_only: bool,
    /// Ratio above which a token with a negative advantage gets a weight from 0.8 to 1: its
    /// probability already rose, although the advantage lowers it. Default 10.
    pub safety_threshold: Option<f64>,
}

impl Default for FutureKl {
    fn default() -> Self {
        Self {
            clip: Clip::asymmetric(0.2, 0.28),
            half_life: 32.,
            weight_clip: Some(0.2),
            high_only: true,
            safety_threshold: Some(10.),
        }
    }
}

impl TokenLoss for FutureKl {
    fn validate(&self) -> Result<()> {
        let clip = self.clip.validate();
        clip.map_err(|e| Invalid::within_error("future_kl", e))?;
        positive("future_kl.half_life", self.half_life)?;
        if let Some(clip) = self.weight_clip {
            non_negative("future_kl.weight_clip", clip)?;
        }
        if let Some(threshold) = self.safety_threshold {
            positive("future_kl.safety_threshold", threshold)?;
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let TokenLosses { loss, mut flags } = self.clip.per_token(inputs)?;
        let d = inputs.token_log_ratio.detach();
        let future = inputs.mask.select(&self.future(&d)?)?;
        let mut weight = self.weight(&future)?;
        let mut unsafe_tokens = weight.zeros_like()?.ne(0.)?;
        if let Some(threshold) = self.safety_threshold {
            unsafe_tokens = both(&inputs.advantages.lt(0.)?, &d.gt(threshold.ln())?)?;
            let (min, max) = SAFE_WEIGHTS;
            weight = unsafe_tokens.where_cond(&weight.clamp(min, max)?, &weight)?;
        }
        flags.push(("future_kl", future));
        flags.push(("influence_weight", weight.clone()));
        flags.push(("safety_fraction", unsafe_tokens));
        Ok(TokenLosses {
            loss: (loss * weight)?,
            flags,
        })
    }
}

impl FutureKl {
    /// Returns the discounted sum of log-ratios from each token on.
    fn future(&self, d: &Tensor) -> Result<Tensor> {
        let d = match self.clip.delta {
            Some(delta) => not(&d.gt(delta.ln())?)?.where_cond(d, &d.zeros_like()?)?,
            None => d.clone(),
        };
        reverse_recurrence(&d, &full_like(&d, 0.5f64.powf(1. / self.half_life))?)
    }

    fn weight(&self, future: &Tensor) -> Result<Tensor> {
        let Some(clip) = self.weight_clip else {
            return future.minimum(EXPONENT_MAX)?.exp();
        };
        let min = if self.high_only { 1. } else { 1. - clip };
        // Bounded before `exp`, which could overflow.
        let weight = future.minimum((1. + clip).ln())?.exp()?;
        weight.maximum(min.max(0.))
    }
}
