//! The interface for reward functions.

use std::sync::Arc;

use anyhow::Result;
use serde_json::Value;

use super::{Score, Scores};
use crate::{FinishReason, Progress};

/// A completion to score.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Prompt text.
    pub prompt: &'a str,
    /// The conversation that the prompt renders. Empty for a plain text.
    pub messages: &'a [Value],
    /// Completion text, without special tokens. With an environment, it is the last turn's text.
    pub completion: &'a str,
    /// Prompt tokens.
    pub prompt_tokens: &'a [u32],
    /// The completion tokens that the policy wrote, including the stop token.
    pub completion_tokens: &'a [u32],
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// All columns in the data set row.
    pub columns: &'a Value,
    /// The prompt's number in the batch. A prompt's completions are adjacent.
    pub group: usize,
}

/// Votes for completions: see [`RewardFunction::votes`].
pub type Votes = Vec<Option<usize>>;

/// Scores a batch of samples; a higher score is better. Several threads may call it at the same
/// time.
///
/// To write your own, pass a closure that scores one sample:
///
/// ```
/// use candle_grpo_rewards::{RewardFunction, Sample};
///
/// let shorter_is_better = |sample: &Sample| -(sample.completion.len() as f32);
/// let _: &dyn RewardFunction = &shorter_is_better;
/// ```
pub trait RewardFunction: Send + Sync {
    /// Returns one score for each sample, in order. Numbers must be finite. If a sample has no
    /// score, return [`Score::NONE`].
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>>;

    /// Returns the scores from [`Self::score`] and, for metrics, the requests that they needed. The
    /// default has no requests: override it if your function sends some.
    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        Scores::new(self.score(samples)?, samples)
    }

    /// Returns the terms whose sum is the score; by default, there is one. Their number is
    /// constant.
    ///
    /// Some advantages, such as GDPO, use them separately.
    fn components(&self, samples: &[Sample]) -> Result<Vec<Scores>> {
        Ok(vec![self.scores(samples)?])
    }

    /// Returns votes for the majority answer (self-consistency, Wang et al. 2022). The completions
    /// share a prompt, whose row is `columns`. A completion's vote is the index of the first one
    /// with an equal answer, or `None` if it has no answer.
    ///
    /// By default, returns `None`: the function compares no answers.
    ///
    /// # Errors
    ///
    /// Fails if the row does not fit the function.
    fn votes(&self, completions: &[&str], columns: &Value) -> Result<Option<Votes>> {
        let _ = (completions, columns);
        Ok(None)
    }

    /// Sets the observer whose stop request ends a long wait for scores, with the error
    /// [`Interrupted`](crate::Interrupted). A function that does not wait can ignore it.
    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        let _ = progress;
    }

    /// Fixes the time that templates print, a local time such as `2025-03-05T14:07:09`, so that a
    /// resumed run has the same scores. A function without templates can ignore it.
    ///
    /// # Errors
    ///
    /// Fails if it is not a time.
    fn set_clock(&mut self, now: &str) -> Result<()> {
        let _ = now;
        Ok(())
    }

    /// Ends the function after a run's last batch.
    ///
    /// # Errors
    ///
    /// Fails if the scores that it returned turn out to be wrong.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

impl<F: Fn(&Sample) -> f32 + Send + Sync> RewardFunction for F {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(self).map(Score::from).collect())
    }
}
