//! Surrogates: per-token losses. Each has one file and one variant in [`Surrogate`].
//!
//! Start with [`Clip`]. Try [`DetachedWeight`] if clipping silences too many tokens, and
//! [`SoftGate`] for a smooth gate.
//!
//! To add a surrogate, implement [`TokenLoss`]. From outside this crate, pass it to
//! [`Surrogate::custom`].

mod clip;
mod covariance;
mod covariance_selection;
mod custom;
mod detached_weight;
mod divergence_mask;
pub(crate) mod future_kl;
mod geometric_mean;
pub(crate) mod group_contrast;
mod likelihood;
mod policy_gradient;
mod soft_gate;
mod squared_log_ratio;
mod token_loss;
mod topr;
pub(crate) mod vespo;

use candle_core::Result;
use candle_grpo_core::inputs::Inputs;
use serde::{Deserialize, Serialize};

pub use clip::Clip;
pub use covariance::{ClipCov, KlCov};
pub use custom::CustomSurrogate;
pub use detached_weight::{DetachedWeight, UnifiedMask};
pub use divergence_mask::{Divergence, DivergenceMask, DropIf, MaskedValue};
pub use geometric_mean::GeometricMean;
pub use likelihood::Likelihood;
pub use policy_gradient::PolicyGradient;
pub use soft_gate::SoftGate;
pub use squared_log_ratio::SquaredLogRatio;
pub use token_loss::{LossLevel, SurrogateInputs, TokenLoss, TokenLosses};
pub use topr::{PositiveIf, Topr};

pub(crate) use future_kl::FutureKl;
pub(crate) use group_contrast::GroupContrast;
pub(crate) use vespo::Vespo;

/// Declares [`Surrogate`], its conversions from each variant's options, and the one match over it.
macro_rules! surrogates {
    ($($(#[$meta:meta])* $options:ident,)*) => {
        /// One token's loss, a function of its ratio, log-prob and advantage.
        ///
        /// Every surrogate works with every importance level, correction, regularizer and
        /// aggregation. There are three exceptions, which reduce over the sequence themselves:
        /// [`Self::GeometricMean`], [`Self::Vespo`] and [`Self::GroupContrast`].
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Surrogate {
            /// The plain policy gradient (REINFORCE, GPG).
            #[doc(alias = "GPG")]
            #[doc(alias = "REINFORCE")]
            PolicyGradient,
            $($(#[$meta])* $options($options),)*
            /// A custom surrogate, see [`Self::custom`]. It has no configuration key.
            #[serde(skip)]
            Custom(CustomSurrogate),
        }

        impl Surrogate {
            fn token_loss(&self) -> &dyn TokenLoss {
                match self {
                    Self::PolicyGradient => &PolicyGradient,
                    $(Self::$options(surrogate) => surrogate,)*
                    Self::Custom(surrogate) => surrogate,
                }
            }
        }

        $(impl From<$options> for Surrogate {
            fn from(options: $options) -> Self {
                Self::$options(options)
            }
        })*
    };
}

surrogates! {
    /// PPO's clipped surrogate. The default.
    #[doc(alias = "PPO")]
    #[doc(alias = "GRPO")]
    #[doc(alias = "DAPO")]
    Clip,
    /// The policy gradient weighted by the bounded, detached ratio (CISPO, truncated importance
    /// sampling).
    #[doc(alias = "CISPO")]
    #[doc(alias = "TIS")]
    #[serde(alias = "cispo")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["cispo"])))]
    DetachedWeight,
    /// The policy gradient with a separate weight for positive and negative samples (TOPR).
    #[doc(alias = "TOPR")]
    Topr,
    /// A sigmoid of the ratio in place of the clip (SAPO).
    #[doc(alias = "SAPO")]
    #[serde(alias = "sapo")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["sapo"])))]
    SoftGate,
    /// The policy gradient with a smooth weight for the whole sequence (VESPO).
    #[doc(alias = "VESPO")]
    Vespo,
    /// The geometric mean over clipped token ratios (GMPO).
    #[doc(alias = "GMPO")]
    #[serde(alias = "gmpo")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["gmpo"])))]
    GeometricMean,
    /// The policy gradient with a penalty on the squared log-ratio (Kimi k1.5, DRO).
    #[doc(alias = "Kimi")]
    #[doc(alias = "DRO")]
    SquaredLogRatio,
    /// The weighted policy gradient without the tokens whose probability moved too far (DPPO).
    #[doc(alias = "DPPO")]
    #[serde(alias = "dppo")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["dppo"])))]
    DivergenceMask,
    /// The clip, with zero loss on selected high-covariance tokens (Clip-Cov).
    ClipCov,
    /// No clip, with a KL penalty on the highest-covariance tokens (KL-Cov).
    KlCov,
    /// The clip, weighted by the later tokens' discounted drift (FIPO).
    #[doc(alias = "FIPO")]
    #[serde(alias = "fipo")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["fipo"])))]
    FutureKl,
    /// Classifies a group's sequences as positive or negative (REAL).
    #[doc(alias = "REAL")]
    #[serde(alias = "real")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["real"])))]
    GroupContrast,
    /// The negative log-likelihood, whatever the advantage (supervised tokens, CHORD).
    #[doc(alias = "CHORD")]
    Likelihood,
}

impl Default for Surrogate {
    fn default() -> Self {
        Self::Clip(Clip::default())
    }
}

impl Surrogate {
    /// Wraps a custom surrogate.
    ///
    /// ```
    /// use candle_core::Result;
    /// use candle_grpo_loss::PolicyLoss;
    /// use candle_grpo_loss::surrogate::{Surrogate, SurrogateInputs, TokenLoss, TokenLosses};
    ///
    /// /// `-r A`, without a clip.
    /// #[derive(Debug)]
    /// struct Unclipped;
    ///
    /// impl TokenLoss for Unclipped {
    ///     fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
    ///         let ratio = inputs.log_ratio.exp()?;
    ///         Ok(TokenLosses::new((ratio * inputs.advantages)?.neg()?))
    ///     }
    /// }
    ///
    /// let policy_loss = PolicyLoss { surrogate: Surrogate::custom(Unclipped), ..PolicyLoss::dapo() };
    /// policy_loss.validate()?;
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn custom(surrogate: impl TokenLoss + 'static) -> Self {
        Self::Custom(CustomSurrogate::new(surrogate))
    }
}

impl TokenLoss for Surrogate {
    fn validate(&self) -> Result<()> {
        self.token_loss().validate()
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        self.token_loss().per_token(inputs)
    }

    fn level(&self) -> LossLevel {
        self.token_loss().level()
    }

    fn needs(&self) -> Inputs {
        self.token_loss().needs()
    }
}
