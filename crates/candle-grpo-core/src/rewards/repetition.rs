//! A penalty for saying the same thing again.

use std::collections::HashSet;
use std::hash::Hash;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// `-penalty * (1 - distinct n-grams / n-grams)` (<https://arxiv.org/abs/2502.03373>; ROLL, with n = 3): 0 for a response
/// that never repeats itself, close to `-penalty` for one that does nothing else.
///
/// ```
/// use candle_grpo_core::RepetitionPenalty;
///
/// let penalty = RepetitionPenalty { ngram: 2, penalty: 1. };
/// assert_eq!(penalty.of(&[1, 2, 3, 4])?, 0.);
/// assert_eq!(penalty.of(&["a", "b", "a", "b", "a"])?, -0.5); // ab ba ab ba
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RepetitionPenalty {
    /// How many items make an n-gram.
    pub ngram: usize,
    /// The largest penalty.
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
    /// What is added to the reward of a response of these tokens (or words), on the host. A response shorter than one
    /// n-gram gets 0.
    pub fn of<T: Eq + Hash>(&self, response: &[T]) -> Result<f64> {
        if self.ngram == 0 {
            bail!("ngram: 0, must be at least 1");
        }
        if !(self.penalty >= 0. && self.penalty.is_finite()) {
            bail!("penalty: {}, must be finite and at least 0", self.penalty);
        }
        let ngrams = response.windows(self.ngram);
        let count = ngrams.len();
        let distinct = ngrams.collect::<HashSet<_>>().len();
        if distinct == count {
            return Ok(0.);
        }
        Ok(self.penalty * (distinct as f64 / count as f64 - 1.))
    }
}
