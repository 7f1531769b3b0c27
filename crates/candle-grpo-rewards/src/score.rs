//! One completion's score.

use serde::{Deserialize, Serialize};

/// A completion's score, which may be missing.
///
/// A completion without a score is excluded: it does not enter its group's statistics, and
/// contributes nothing to the loss and its totals. If only some terms in a weighted sum are
/// missing, the others are summed (as in TRL).
///
/// ```
/// use candle_grpo_rewards::{Score, ScoreFailure};
///
/// assert_eq!(Score::from(0.5).value(), Some(0.5));
/// assert_eq!(Score::NONE.value(), None);
///
/// let late = Score::NONE.after(ScoreFailure::Timeout);
/// assert_eq!((late.value(), late.failure()), (None, Some(ScoreFailure::Timeout)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    value: Option<f32>,
    failure: Option<ScoreFailure>,
}

/// Why a reward function did not compute a completion's score. Metrics count the reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFailure {
    /// It exceeded its time.
    Timeout,
    /// It ended, or did not work: a program that crashed, or a server with errors.
    Crash,
    /// It answered without a score: a judge that gave no verdict.
    Unscorable,
}

/// Treatment for a completion whose score was not computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// A fixed score.
    #[default]
    Score,
    /// No score: [`Score::NONE`].
    Exclude,
}

impl Score {
    /// No score: the completion is excluded.
    pub const NONE: Self = Self {
        value: None,
        failure: None,
    };

    /// Returns the number, or `None` if the completion has no score.
    pub fn value(self) -> Option<f32> {
        self.value
    }

    /// Returns why the function did not compute the score.
    pub fn failure(self) -> Option<ScoreFailure> {
        self.failure
    }

    /// Marks this score as a replacement for one that was not computed.
    #[must_use]
    pub fn after(self, failure: ScoreFailure) -> Self {
        Self {
            failure: Some(failure),
            ..self
        }
    }

    /// Returns this score with another value, if it has one.
    pub(super) fn map(self, change: impl FnOnce(f32) -> f32) -> Self {
        Self {
            value: self.value.map(change),
            ..self
        }
    }
}

impl From<f32> for Score {
    fn from(value: f32) -> Self {
        Self {
            value: Some(value),
            failure: None,
        }
    }
}

/// A score equals its number.
impl PartialEq<f32> for Score {
    fn eq(&self, number: &f32) -> bool {
        self.value.as_ref() == Some(number)
    }
}

impl OnFailure {
    /// Returns the score after `failure`, with the number `score` if it is fixed.
    pub(super) fn score(self, score: f32, failure: ScoreFailure) -> Score {
        let instead = match self {
            Self::Score => Score::from(score),
            Self::Exclude => Score::NONE,
        };
        instead.after(failure)
    }
}
