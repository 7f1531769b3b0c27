//! The coefficient of a KL penalty, fixed or steered.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// The coefficient of a KL penalty over the steps of a training. What serde writes is its whole state.
///
/// ```
/// use candle_grpo_core::KlController;
///
/// let mut controller = KlController::adaptive(0.2, 0.1, 10_000.)?;
/// controller.update(0.5, 1024)?; // five times the target: the coefficient grows, at most by 0.2 * 1024 / 10000
/// assert!((controller.coef() - 0.2 * 1.02048).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum KlController {
    /// Always the same.
    Fixed {
        /// The coefficient.
        coef: f64,
    },
    /// `coef * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)` after each step
    /// (<https://arxiv.org/abs/1909.08593>; verl, ROLL, OpenRLHF, which let the coefficient turn negative in a step of more
    /// than five times as many samples as the horizon). A coefficient of 0 stays 0.
    Adaptive {
        /// The coefficient as it is now.
        coef: f64,
        /// The divergence to hold.
        target: f64,
        /// How many samples it takes to change the coefficient by its own size, were the error 1.
        horizon: f64,
    },
}

/// How large an error counts at most.
const MAX_ERROR: f64 = 0.2;

impl KlController {
    /// Always `coef`.
    pub fn fixed(coef: f64) -> Result<Self> {
        let controller = Self::Fixed { coef };
        controller.validate()?;
        Ok(controller)
    }

    /// Starts with `coef`.
    pub fn adaptive(coef: f64, target: f64, horizon: f64) -> Result<Self> {
        let controller = Self::Adaptive {
            coef,
            target,
            horizon,
        };
        controller.validate()?;
        Ok(controller)
    }

    /// The coefficient for the next step.
    pub fn coef(&self) -> f64 {
        match *self {
            Self::Fixed { coef } | Self::Adaptive { coef, .. } => coef,
        }
    }

    /// Takes note of the mean divergence `kl` of a step of that many samples: the mean over sequences of the means over
    /// their tokens, of the estimator that the penalty has (`reward_kl_per_sequence` of [`crate::TokenShaping`]).
    pub fn update(&mut self, kl: f64, samples: usize) -> Result<()> {
        self.validate()?;
        if !kl.is_finite() {
            bail!("kl: {kl}, must be finite");
        }
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

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        let coef = self.coef();
        if !(coef >= 0. && coef.is_finite()) {
            bail!("coef: {coef}, must be finite and at least 0");
        }
        if let Self::Adaptive {
            target, horizon, ..
        } = *self
        {
            for (name, x) in [("target", target), ("horizon", horizon)] {
                if !(x > 0. && x.is_finite()) {
                    bail!("{name}: {x}, must be positive and finite");
                }
            }
        }
        Ok(())
    }
}
