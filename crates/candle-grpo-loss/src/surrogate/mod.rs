//! What one token scores: one file and one enum variant for each surrogate.

mod clip;
mod policy_gradient;

use candle_core::{Result, Tensor};
use candle_grpo_core::Mask;
use serde::{Deserialize, Serialize};

pub use clip::Clip;

/// The loss of one token, as a function of its ratio, its log-prob and its advantage.
///
/// Every surrogate works with every importance level, regulariser and aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surrogate {
    /// The clipped surrogate of PPO.
    Clip(Clip),
    /// `-advantage * log_prob`: the plain policy gradient (REINFORCE; GPG, <https://arxiv.org/abs/2504.02546>).
    PolicyGradient,
}

impl Default for Surrogate {
    fn default() -> Self {
        Self::Clip(Clip::default())
    }
}

/// What a surrogate may use; everything is `[B, T]`, of one dtype, and holds 0 outside the mask.
pub(crate) struct SurrogateInputs<'a> {
    /// With gradient.
    pub(crate) log_probs: &'a Tensor,
    /// The log-ratio at the importance level, with gradient.
    pub(crate) log_ratio: &'a Tensor,
    /// A constant.
    pub(crate) advantages: &'a Tensor,
}

/// What a surrogate says of each token.
pub(crate) struct TokenLosses {
    /// `[B, T]`, with gradient.
    pub(crate) loss: Tensor,
    /// Names and flags, u8 `[B, T]`, whose means over the mask are metrics.
    pub(crate) flags: Vec<(&'static str, Tensor)>,
}

impl Surrogate {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Clip(clip) => clip.validate(),
            Self::PolicyGradient => Ok(()),
        }
    }

    pub(crate) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        match self {
            Self::Clip(clip) => clip.per_token(inputs),
            Self::PolicyGradient => policy_gradient::per_token(inputs),
        }
    }
}

/// `a` where both flags hold, u8.
fn both(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a * b
}

/// 1 where at least one flag holds, u8.
fn either(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.maximum(b)
}

/// Used by the losses: the mean of a flag, or of anything else, over the mask.
pub(crate) fn push_flags(
    metrics: &mut candle_grpo_core::Metrics,
    flags: &[(&'static str, Tensor)],
    mask: &Mask,
) -> Result<()> {
    for (name, flag) in flags {
        metrics.push_masked_mean(name, flag, mask)?;
    }
    Ok(())
}
