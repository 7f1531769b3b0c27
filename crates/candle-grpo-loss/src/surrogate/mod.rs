//! What one token scores: one file and one enum variant for each surrogate.

mod clip;
mod covariance;
mod detached_weight;
mod divergence_mask;
mod geometric_mean;
mod policy_gradient;
mod soft_gate;
mod squared_log_ratio;
mod topr;
mod vespo;

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::Mask;
use serde::{Deserialize, Serialize};

pub use clip::Clip;
pub use covariance::{ClipCov, KlCov};
pub use detached_weight::{DetachedWeight, UnifiedMask};
pub use divergence_mask::{Divergence, DivergenceMask};
pub use geometric_mean::GeometricMean;
pub use soft_gate::SoftGate;
pub use squared_log_ratio::SquaredLogRatio;
pub use topr::{PositiveIf, Topr};
pub use vespo::Vespo;

use crate::importance::ImportanceLevel;

/// The loss of one token, as a function of its ratio, its log-prob and its advantage.
///
/// Every surrogate works with every importance level, correction, regulariser and aggregation, but for
/// [`Self::GeometricMean`] and [`Self::Vespo`], which are defined on the tokens of a sequence and bring their own level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surrogate {
    /// The clipped surrogate of PPO.
    Clip(Clip),
    /// `-advantage * log_prob`: the plain policy gradient (REINFORCE; GPG, <https://arxiv.org/abs/2504.02546>).
    PolicyGradient,
    /// The policy gradient weighted by the bounded ratio, a constant (CISPO, truncated importance sampling).
    DetachedWeight(DetachedWeight),
    /// The policy gradient with a weight of its own for each sign (TOPR).
    Topr(Topr),
    /// A sigmoid of the ratio in place of the clip (SAPO).
    SoftGate(SoftGate),
    /// The policy gradient with a smooth weight of the whole sequence (VESPO).
    Vespo(Vespo),
    /// The geometric mean of ratios that are clipped one by one (GMPO).
    GeometricMean(GeometricMean),
    /// The policy gradient with a penalty on the squared log-ratio (Kimi k1.5, DRO).
    SquaredLogRatio(SquaredLogRatio),
    /// The weighted policy gradient without the tokens whose probability has moved too far (DPPO).
    DivergenceMask(DivergenceMask),
    /// The clip, with nothing for selected tokens of high covariance (Clip-Cov).
    ClipCov(ClipCov),
    /// No clip, with a KL penalty on the tokens of highest covariance (KL-Cov).
    KlCov(KlCov),
}

impl Default for Surrogate {
    fn default() -> Self {
        Self::Clip(Clip::default())
    }
}

macro_rules! from_options {
    ($($options:ident),*) => {$(
        impl From<$options> for Surrogate {
            fn from(options: $options) -> Self {
                Self::$options(options)
            }
        }
    )*};
}
from_options!(
    Clip,
    DetachedWeight,
    Topr,
    SoftGate,
    Vespo,
    GeometricMean,
    SquaredLogRatio,
    DivergenceMask,
    ClipCov,
    KlCov
);

/// What a surrogate may use; tensors are `[B, T]`, of one dtype, and hold 0 outside the mask.
pub(crate) struct SurrogateInputs<'a> {
    /// With gradient.
    pub(crate) log_probs: &'a Tensor,
    /// A constant.
    pub(crate) old_log_probs: &'a Tensor,
    /// The clamped log-ratio of each token, with gradient.
    pub(crate) token_log_ratio: &'a Tensor,
    /// The log-ratio at the importance level, with gradient.
    pub(crate) log_ratio: &'a Tensor,
    /// A constant.
    pub(crate) advantages: &'a Tensor,
    pub(crate) mask: &'a Mask,
    /// Scores of the samples, constants.
    pub(crate) scores: Option<&'a Tensor>,
    /// Weights for samples of another engine, constants.
    pub(crate) importance_weights: Option<&'a Tensor>,
    /// 1 for the tokens that were selected over the whole step, u8.
    pub(crate) selected: Option<&'a Tensor>,
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
            Self::Clip(s) => s.validate(),
            Self::PolicyGradient => Ok(()),
            Self::DetachedWeight(s) => s.validate(),
            Self::Topr(s) => s.validate(),
            Self::SoftGate(s) => s.validate(),
            Self::Vespo(s) => s.validate(),
            Self::GeometricMean(s) => s.validate(),
            Self::SquaredLogRatio(s) => s.validate(),
            Self::DivergenceMask(s) => s.validate(),
            Self::ClipCov(s) => s.validate(),
            Self::KlCov(s) => s.validate(),
        }
    }

    pub(crate) fn validate_level(&self, level: ImportanceLevel) -> Result<()> {
        let own_level = match self {
            Self::Vespo(_) => "vespo",
            Self::GeometricMean(_) => "geometric_mean",
            _ => return Ok(()),
        };
        if level != ImportanceLevel::Token {
            bail!(
                "importance_level: {level:?} with the surrogate {own_level}, which averages over the sequence itself; must be Token"
            );
        }
        Ok(())
    }

    /// Whether the surrogate takes the importance weights into its own, instead of being multiplied by them.
    pub(crate) fn absorbs_importance_weights(&self) -> bool {
        matches!(self, Self::Vespo(_) | Self::GeometricMean(_))
    }

    pub(crate) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        match self {
            Self::Clip(s) => s.per_token(inputs),
            Self::PolicyGradient => policy_gradient::per_token(inputs),
            Self::DetachedWeight(s) => s.per_token(inputs),
            Self::Topr(s) => s.per_token(inputs),
            Self::SoftGate(s) => s.per_token(inputs),
            Self::Vespo(s) => s.per_token(inputs),
            Self::GeometricMean(s) => s.per_token(inputs),
            Self::SquaredLogRatio(s) => s.per_token(inputs),
            Self::DivergenceMask(s) => s.per_token(inputs),
            Self::ClipCov(s) => s.per_token(inputs),
            Self::KlCov(s) => s.per_token(inputs),
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

/// 1 where the flag does not hold, u8.
fn not(a: &Tensor) -> Result<Tensor> {
    a.eq(0u8)
}

/// `a` where the advantage is positive, elsewhere `b`.
fn by_sign(advantages: &Tensor, positive: f64, other: f64) -> Result<Tensor> {
    let fill = |x: f64| advantages.zeros_like()? + x;
    advantages
        .gt(0.)?
        .where_cond(&fill(positive)?, &fill(other)?)
}

/// `-weight * advantage * log_prob` with a constant weight.
fn weighted_policy_gradient(inputs: &SurrogateInputs, weight: &Tensor) -> Result<Tensor> {
    ((weight.detach() * inputs.advantages)? * inputs.log_probs)?.neg()
}
