//! A penalty for repeated n-grams.

use std::collections::HashSet;
use std::hash::Hash;

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// The penalty `-penalty * (1 - distinct n-grams / n-grams)` (<https://arxiv.org/abs/2502.03373>;
/// ROLL, with n = 3). It is 0 for a response without repetition, and close to `-penalty` for one
/// that only repeats.
///
/// ```
/// use candle_grpo_core::rewards::RepetitionPenalty;
///
/// let penalty = RepetitionPenalty { ngram: 2, penalty: 1. };
/// assert_eq!(penalty.compute(&[1, 2, 3, 4])?, 0.);
/// assert_eq!(penalty.compute(&["a", "b", "a", "b", "a"])?, -0.5); // ab ba ab ba
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RepetitionPenalty {
    /// n-gram length, in tokens or words. Default 3.
    pub ngram: usize,
    /// Largest penalty. Default 1.
    pub penalty: f64,
}

impl Default for RepetitionPenalty {
    fn default() -> Self {
        Self {
            ngram: 3,
            penalty: 1.,
        }
    }
}

impl RepetitionPenalty {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::at_least_one("ngram", self.ngram)?;
        validate::non_negative("penalty", self.penalty)
    }

    /// Computes the term, at most 0, that you add to the reward for a response with these tokens or
    /// words. A response shorter than one n-gram gets 0.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn compute<T: Eq + Hash>(&self, response: &[T]) -> Result<f64> {
        self.validate()?;
        let ngrams = response.windows(self.ngram);
        let count = ngrams.len();
        let distinct = ngrams.collect::<HashSet<_>>().len();
        if distinct == count {
            return Ok(0.);
        }
        Ok(self.penalty * (distinct as f64 / count as f64 - 1.))
    }
}
