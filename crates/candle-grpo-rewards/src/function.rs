//! The interface of reward functions.

use std::sync::Arc;

use anyhow::Result;
use serde_json::Value;

use super::{Score, Scores};
use crate::{FinishReason, Progress};

/// A completion to score.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// The text of the prompt.
    pub prompt: &'a str,
    /// The conversation that the prompt renders, empty for a
    /// plain text.
    pub messages: &'a [Value],
    /// The text of the completion, without special tokens: that of its last turn, if there is an
    /// environment.
    pub completion: &'a str,
    /// The tokens of the prompt.
    pub prompt_tokens: &'a [u32],
    /// The tokens of the completion that the policy wrote, the stop token included.
    pub completion_tokens: &'a [u32],
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// All columns of the row of the data set.
    pub columns: &'a Value,
    /// The number of its prompt among those of the batch. The completions of a prompt are one
    /// after the other.
    pub group: usize,
}

/// The votes of completions: see [`RewardFunction::votes`].
pub type Votes = Vec<Option<usize>>;

/// Scores a batch of samples; a higher score is better. Several threads may call it at the same
/// time.
///
/// A closure that scores one sample implements it:
///
/// ```
/// use candle_grpo_rewards::{RewardFunction, Sample};
///
/// let shorter_is_better = |sample: &Sample| -(sample.completion.len() as f32);
/// let _: &dyn RewardFunction = &shorter_is_better;
/// ```
pub trait RewardFunction: Send + Sync {
    /// Returns one score for each sample, in their order. Numbers must be finite; a sample without
    /// a score has [`Score::NONE`].
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>>;

    /// Returns the scores of [`Self::score`], and for metrics the requests that they took. A
    /// function that asks no server has none, which is the default.
    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        Scores::new(self.score(samples)?, samples)
    }

    /// Returns the terms whose sum is the score: one term by default. Their number is constant.
    ///
    /// Some advantages use them separately, such as GDPO.
    fn components(&self, samples: &[Sample]) -> Result<Vec<Scores>> {
        Ok(vec![self.scores(samples)?])
    }

    /// Returns the votes of completions of one prompt, whose row is `columns`, for the majority of
    /// their answers (self-consistency, Wang et al. 2022): for each the place of the first one with
    /// an equal answer, or none if it has no answer.
    ///
    /// Returns none if the function compares no answers, which is the default.
    ///
    /// # Errors
    ///
    /// If the row does not fit the function.
    fn votes(&self, completions: &[&str], columns: &Value) -> Result<Option<Votes>> {
        let _ = (completions, columns);
        Ok(None)
    }

    /// Sets the observer whose request to stop ends a long wait for scores, with the error
    /// [`Interrupted`](crate::Interrupted). A function that does not wait can ignore it.
    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        let _ = progress;
    }

    /// Fixes the time that templates print, a local time such as `2025-03-05T14:07:09`, so that a
    /// run that resumes has the same scores. A function without templates can ignore it.
    ///
    /// # Errors
    ///
    /// If it is no time.
    fn set_clock(&mut self, now: &str) -> Result<()> {
        let _ = now;
        Ok(())
    }

    /// Ends the function after the last batch of a run.
    ///
    /// # Errors
    ///
    /// If the scores that it has given turn out to be wrong.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

impl<F: Fn(&Sample) -> f32 + Send + Sync> RewardFunction for F {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(self).map(Score::from).collect())
    }
}
