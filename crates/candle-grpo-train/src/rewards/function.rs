//! The interface of reward functions.

use std::ops::Deref;
use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{FinishReason, Progress};

/// A completion to score.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// The text of the prompt.
    pub prompt: &'a str,
    /// The conversation that the prompt renders, as in [`Prompt`](crate::Prompt); empty for a plain
    /// text.
    pub messages: &'a [Value],
    /// The text of the completion, without special tokens.
    pub completion: &'a str,
    /// The tokens of the prompt.
    pub prompt_tokens: &'a [u32],
    /// The tokens of the completion, the stop token included.
    pub completion_tokens: &'a [u32],
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// All columns of the row of the data set.
    pub columns: &'a Value,
}

/// Scores a batch of samples; a higher score is better. Several threads may call it at the same
/// time.
///
/// A closure that scores one sample implements it:
///
/// ```
/// use candle_grpo_train::{RewardFunction, Sample};
///
/// let shorter_is_better = |sample: &Sample| -(sample.completion.len() as f32);
/// let _: &dyn RewardFunction = &shorter_is_better;
/// ```
pub trait RewardFunction: Send + Sync {
    /// Returns one finite score for each sample, in their order.
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>>;

    /// Returns the terms whose sum is the score: one term by default. Their number is constant.
    ///
    /// Some advantages use them separately, such as GDPO.
    fn components(&self, samples: &[Sample]) -> Result<Vec<Scores>> {
        Ok(vec![Scores::new(self.score(samples)?, samples)?])
    }

    /// Sets the observer whose request to stop ends a long wait for scores, with the error
    /// [`Interrupted`](crate::Interrupted). A function that does not wait can ignore it.
    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        let _ = progress;
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
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        Ok(samples.iter().map(self).collect())
    }
}

/// One finite score for each sample of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores(Vec<f32>);

impl Scores {
    /// Checks `scores`.
    ///
    /// # Errors
    ///
    /// If their number is not that of `samples`, or one is not finite.
    pub fn new(scores: Vec<f32>, samples: &[Sample]) -> Result<Self> {
        ensure!(
            scores.len() == samples.len(),
            "rewards: {} scores for {} samples, there must be one for each",
            scores.len(),
            samples.len()
        );
        for (i, (score, sample)) in scores.iter().zip(samples).enumerate() {
            ensure!(
                score.is_finite(),
                "rewards: sample {i} (prompt {:?}, completion {:?}) has reward {score}, must be finite",
                sample.prompt,
                sample.completion
            );
        }
        Ok(Self(scores))
    }

    /// The scores as a vector.
    pub fn into_vec(self) -> Vec<f32> {
        self.0
    }
}

impl Deref for Scores {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_must_be_as_many_as_samples() {
        let sample = Sample {
            prompt: "say",
            messages: &[],
            completion: "yes",
            prompt_tokens: &[1],
            completion_tokens: &[2],
            finish_reason: FinishReason::StopToken,
            columns: &Value::Null,
        };
        let error = Scores::new(vec![0.; 2], &[sample; 3]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rewards: 2 scores for 3 samples, there must be one for each"
        );
    }
}
