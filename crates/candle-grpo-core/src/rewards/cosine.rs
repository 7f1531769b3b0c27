//! Length-dependent rewards for right and wrong answers.

use std::f64::consts::PI;

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// The cosine-scaled reward (<https://arxiv.org/abs/2502.03373>). Short right answers score more
/// than long ones, and short wrong answers score less than long ones.
///
/// The reward is
/// `long + (short - long) * (1 + cos(pi * min(1, length / max_length))) / 2`,
/// where `short` and `long` are the scores at lengths 0 and `max_length`. TRL's
/// `get_cosine_scaled_reward` is equal. ms-swift has no `min`, so scores beyond `max_length` return
/// to `short`: set `periodic` for that.
///
/// ```
/// use candle_grpo_core::rewards::CosineLength;
///
/// let scale = CosineLength { max_length: 100, ..CosineLength::default() };
/// assert_eq!(scale.compute(0, true)?, 1.);
/// assert_eq!(scale.compute(50, true)?, 0.75);
/// assert_eq!(scale.compute(200, true)?, 0.5);
/// assert_eq!(scale.compute(0, false)?, -1.);
/// assert_eq!(scale.compute(100, false)?, -0.5);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CosineLength {
    /// Length in tokens from which the score is constant. Default 1000.
    pub max_length: usize,
    /// Score for a right answer with `max_length` tokens. Default 0.5.
    pub min_value_correct: f64,
    /// Score for a right answer with length 0. Default 1.
    pub max_value_correct: f64,
    /// Score for a wrong answer with length 0. Default -1.
    pub min_value_wrong: f64,
    /// Score for a wrong answer with `max_length` tokens. Default -0.5.
    pub max_value_wrong: f64,
    /// Continues the cosine beyond `max_length`, as ms-swift does: the longest answers score like
    /// short ones. Default `false`.
    pub periodic: bool,
}

impl Default for CosineLength {
    fn default() -> Self {
        Self {
            max_length: 1000,
            min_value_correct: 0.5,
            max_value_correct: 1.,
            min_value_wrong: -1.,
            max_value_wrong: -0.5,
            periodic: false,
        }
    }
}

impl CosineLength {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::check(self.max_length > 0, "max_length", 0, "be at least 1")?;
        for (name, value) in [
            ("min_value_correct", self.min_value_correct),
            ("max_value_correct", self.max_value_correct),
            ("min_value_wrong", self.min_value_wrong),
            ("max_value_wrong", self.max_value_wrong),
        ] {
            validate::check(value.is_finite(), name, value, "be finite")?;
        }
        Ok(())
    }

    /// Computes the reward for an answer with `length` tokens.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn compute(&self, length: usize, is_correct: bool) -> Result<f64> {
        self.validate()?;
        let (short, long) = if is_correct {
            (self.max_value_correct, self.min_value_correct)
        } else {
            (self.min_value_wrong, self.max_value_wrong)
        };
        let progress = length as f64 / self.max_length as f64;
        let progress = if self.periodic {
            progress
        } else {
            progress.min(1.)
        };
        Ok(long + (short - long) * (1. + (PI * progress).cos()) / 2.)
    }
}
