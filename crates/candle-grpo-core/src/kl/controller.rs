//! Coefficient of a KL penalty, fixed or adaptive.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// Coefficient of a KL penalty over the steps of a run. The serialized form is the whole state.
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
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum KlController {
    /// Constant.
    Fixed {
        /// Coefficient.
        coef: f64,
    },
    /// `coef * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)` after each step
    /// (<https://arxiv.org/abs/1909.08593>; verl, ROLL, OpenRLHF). A coefficient of 0 stays 0. In those libraries the
    /// coefficient becomes negative in a step of more than `5 * horizon` samples.
    Adaptive {
        /// Current coefficient.
        coef: f64,
        /// Target divergence.
        target: f64,
        /// Number of samples in which an error of 1 would double the coefficient.
        horizon: f64,
    },
}

/// Largest relative error that is applied.
const MAX_ERROR: f64 = 0.2;

impl KlController {
    /// A constant coefficient.
    ///
    /// # Errors
    ///
    /// Fails if it is not finite and at least 0.
    pub fn fixed(coef: f64) -> Result<Self> {
        let controller = Self::Fixed { coef };
        controller.validate()?;
        Ok(controller)
    }

    /// An adaptive coefficient that starts at `coef`.
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

    /// Returns the coefficient of the next step.
    pub fn coef(&self) -> f64 {
        match *self {
            Self::Fixed { coef } | Self::Adaptive { coef, .. } => coef,
        }
    }

    /// Updates the coefficient with the mean divergence `kl` of a step of `samples` samples.
    ///
    /// `kl` is the mean over sequences of the means over their tokens, from the estimator of the
    /// penalty: the metric `reward_kl_per_sequence` of [`crate::TokenAdvantage`].
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
    /// Fails with the name of the invalid option.
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
