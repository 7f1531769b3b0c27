//! Coefficients that change during training.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// A coefficient that rises linearly from 0 to `peak`, then falls to `end`.
///
/// Use [`Self::constant`] for a fixed value.
///
/// ```
/// use candle_grpo_core::schedule::{CoefSchedule, Decay};
///
/// let schedule = CoefSchedule {
///     warmup_steps: 10,
///     decay_steps: Some(20),
///     end: 0.1,
///     decay: Decay::Cosine,
///     ..CoefSchedule::constant(0.9)
/// };
/// assert_eq!(schedule.at(5), 0.45);
/// assert_eq!(schedule.at(10), 0.9);
/// assert!((schedule.at(20) - 0.5).abs() < 1e-12);
/// assert_eq!(schedule.at(1000), 0.1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CoefSchedule {
    /// Coefficient after the warm-up. Default 1.
    pub peak: f64,
    /// Number of warm-up steps, starting from 0. Default 0.
    pub warmup_steps: usize,
    /// Number of decay steps. If absent, there is no decay. Absent by default.
    pub decay_steps: Option<usize>,
    /// Coefficient after the decay. Default 0.
    pub end: f64,
    /// Decay shape. Default `linear`.
    pub decay: Decay,
}

/// Decay shape for a [`CoefSchedule`] or a learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Decay {
    /// A straight line. The default.
    #[default]
    Linear,
    /// Half a cosine period (Loshchilov and Hutter 2017, <https://arxiv.org/abs/1608.03983>).
    Cosine,
}

impl Decay {
    /// Returns the share of the initial value that is left, where `remaining` is the share of decay
    /// steps that remain: r for a line, `(1 - cos(pi r)) / 2` for a cosine.
    pub fn share(self, remaining: f64) -> f64 {
        match self {
            Self::Linear => remaining,
            Self::Cosine => (1. - (PI * remaining).cos()) / 2.,
        }
    }
}

impl Default for CoefSchedule {
    fn default() -> Self {
        Self::constant(1.)
    }
}

impl CoefSchedule {
    /// Creates a schedule with the same coefficient in every step.
    pub fn constant(peak: f64) -> Self {
        Self {
            peak,
            warmup_steps: 0,
            decay_steps: None,
            end: 0.,
            decay: Decay::Linear,
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::non_negative("peak", self.peak)?;
        validate::non_negative("end", self.end)
    }

    /// Returns the coefficient after `step` steps.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let Some(steps) = self.decay_steps else {
            return self.peak;
        };
        let passed = step - self.warmup_steps;
        if passed >= steps {
            return self.end;
        }
        let share = self.decay.share(1. - passed as f64 / steps as f64);
        self.end + (self.peak - self.end) * share
    }
}
