//! KL penalty coefficients, fixed or adaptive.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// A KL penalty coefficient over a training run. The serialized form is the complete state.
///
/// Start with a fixed coefficient. Use an adaptive one if the divergence keeps growing, or if you
/// know the divergence that you want.
///
/// ```
/// use candle_grpo_core::kl::KlController;
///
/// let mut controller = KlController::adaptive(0.2, 0.1, 10_000.)?;
/// controller.update(0.5, 1024)?; // five times the target: the coefficient grows, at most by 0.2 * 1024 / 10000
/// assert!((controller.coef() - 0.2 * 1.02048).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum KlController {
    /// Constant.
    Fixed {
        /// Coefficient.
        coef: f64,
    },
    /// `coef * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)` after each step
    /// (<https://arxiv.org/abs/1909.08593>; verl, ROLL, OpenRLHF). A coefficient that is 0 stays 0.
    /// In those libraries, the coefficient becomes negative if a step has more than `5 * horizon`
    /// samples.
    Adaptive {
        /// Current coefficient.
        coef: f64,
        /// Target divergence.
        target: f64,
        /// Number of samples over which an error of 1 would double the coefficient.
        horizon: f64,
    },
}

/// Largest relative error that is applied.
const MAX_ERROR: f64 = 0.2;

impl KlController {
    /// Creates a constant coefficient.
    ///
    /// # Errors
    ///
    /// Fails if it is not finite and at least 0.
    pub fn fixed(coef: f64) -> Result<Self> {
        let controller = Self::Fixed { coef };
        controller.validate()?;
        Ok(controller)
    }

    /// Creates an adaptive coefficient that starts at `coef`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn adaptive(coef: f64, target: f64, horizon: f64) -> Result<Self> {
        let controller = Self::Adaptive {
            coef,
            target,
            horizon,
        };
        controller.validate()?;
        Ok(controller)
    }

    /// Returns the coefficient for the next step.
    pub fn coef(&self) -> f64 {
        match *self {
            Self::Fixed { coef } | Self::Adaptive { coef, .. } => coef,
        }
    }

    /// Updates the coefficient after a step with `samples` samples and mean divergence `kl`.
    ///
    /// `kl` averages each sequence's mean over its tokens, estimated as in the penalty. It is the
    /// metric `reward_kl_per_sequence` from [`crate::TokenAdvantage`].
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid or `kl` is not finite.
    pub fn update(&mut self, kl: f64, samples: usize) -> Result<()> {
        self.validate()?;
        validate::finite("kl", kl)?;
        if let Self::Adaptive {
            coef,
            target,
            horizon,
        } = self
        {
            let error = (kl / *target - 1.).clamp(-MAX_ERROR, MAX_ERROR);
            *coef *= (1. + error * samples as f64 / *horizon).max(0.);
        }
        Ok(())
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::non_negative("coef", self.coef())?;
        if let Self::Adaptive {
            target, horizon, ..
        } = *self
        {
            validate::positive("target", target)?;
            validate::positive("horizon", horizon)?;
        }
        Ok(())
    }
}
