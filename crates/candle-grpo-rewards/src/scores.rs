//! A batch's scores.

use std::ops::Deref;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::{RewardRequests, Sample, Score, ScoreFailure};

/// One score for each sample in a batch. A missing score is NaN, and all others are finite.
/// [`NonFinite::Exclude`](candle_grpo_core::rewards::NonFinite::Exclude) leaves out missing scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    name: Option<String>,
    numbers: Vec<f32>,
    failures: Vec<Option<ScoreFailure>>,
    /// One per sample, or none if no sample has any.
    feedback: Vec<Option<String>>,
    requests: RewardRequests,
}

impl Scores {
    /// Creates the scores for `samples` and checks them.
    ///
    /// # Errors
    ///
    /// Fails if there is not one score for each sample, or if a score is NaN or infinite. A missing
    /// score is [`Score::NONE`].
    pub fn new(scores: Vec<Score>, samples: &[Sample]) -> Result<Self> {
        ensure!(
            scores.len() == samples.len(),
            "rewards: {} scores for {} samples, there must be one for each",
            scores.len(),
            samples.len()
        );
        for (i, (score, sample)) in scores.iter().zip(samples).enumerate() {
            if let Some(number) = score.value() {
                ensure!(
                    number.is_finite(),
                    "rewards: sample {i} (prompt {:?}, completion {:?}) has reward {number}, must be finite",
                    sample.prompt,
                    sample.completion
                );
            }
        }
        let number = |score: &Score| score.value().unwrap_or(f32::NAN);
        Ok(Self {
            name: None,
            numbers: scores.iter().map(number).collect(),
            failures: scores.into_iter().map(Score::failure).collect(),
            feedback: Vec::new(),
            requests: RewardRequests::default(),
        })
    }

    /// Sets what the reward says about each sample, in words. A teacher may read it.
    ///
    /// # Errors
    ///
    /// Fails if there is not one entry for each sample.
    pub fn with_feedback(self, feedback: Vec<Option<String>>) -> Result<Self> {
        ensure!(
            feedback.len() == self.numbers.len(),
            "feedback: {} for {} samples, there must be one for each",
            feedback.len(),
            self.numbers.len()
        );
        let has_any = feedback.iter().any(Option::is_some);
        let feedback = if has_any { feedback } else { Vec::new() };
        Ok(Self { feedback, ..self })
    }

    /// Returns what the reward says about the sample at `place`.
    pub fn feedback(&self, place: usize) -> Option<&str> {
        self.feedback.get(place)?.as_deref()
    }

    /// The feedback of all samples, with `None` for those without any.
    pub(super) fn all_feedback(&self) -> Vec<Option<String>> {
        let all = (0..self.numbers.len()).map(|place| self.feedback(place));
        all.map(|text| text.map(str::to_owned)).collect()
    }

    /// Sets the reward's name, for metrics.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self {
            name: Some(name.to_owned()),
            ..self
        }
    }

    /// Sets the requests that the scores needed, for metrics.
    #[must_use]
    pub fn with_requests(self, requests: RewardRequests) -> Self {
        Self { requests, ..self }
    }

    /// Returns the requests that the scores needed.
    pub fn requests(&self) -> RewardRequests {
        self.requests
    }

    /// Returns the reward's name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns why the function did not compute this sample's score.
    pub(super) fn failure(&self, sample: usize) -> Option<ScoreFailure> {
        self.failures.get(sample).copied().flatten()
    }

    /// Returns each sample's score.
    pub fn iter_scores(&self) -> impl Iterator<Item = Score> {
        let numbers = self.numbers.iter().zip(&self.failures);
        numbers.map(|(&number, &failure)| {
            let score = if number.is_nan() {
                Score::NONE
            } else {
                Score::from(number)
            };
            match failure {
                Some(failure) => score.after(failure),
                None => score,
            }
        })
    }

    /// Returns the numbers as a vector.
    pub fn into_vec(self) -> Vec<f32> {
        self.numbers
    }

    /// Counts the scores that are missing or were not computed.
    pub fn faults(&self) -> RewardFaults {
        let failed = |kind| self.failures.iter().filter(|f| **f == Some(kind)).count();
        RewardFaults {
            timeouts: failed(ScoreFailure::Timeout),
            crashes: failed(ScoreFailure::Crash),
            unscorable: failed(ScoreFailure::Unscorable),
            excluded: self.numbers.iter().filter(|x| x.is_nan()).count(),
        }
    }

    /// Leaves out the score at `place`.
    pub fn exclude(&mut self, place: usize) {
        self.numbers[place] = f32::NAN;
    }

    /// Sets the score at `place` to a finite number.
    pub fn set(&mut self, place: usize, number: f32) {
        self.numbers[place] = number;
        self.failures[place] = None;
    }

    /// Appends the scores in `other`.
    pub fn extend(&mut self, other: Self) {
        if !(self.feedback.is_empty() && other.feedback.is_empty()) {
            self.feedback = [self.all_feedback(), other.all_feedback()].concat();
        }
        self.numbers.extend(other.numbers);
        self.failures.extend(other.failures);
        self.requests += other.requests;
    }

    /// Replaces the score at `place` with the score at `from` in `other`.
    pub fn replace(&mut self, place: usize, other: &Self, from: usize) {
        self.numbers[place] = other.numbers[from];
        self.failures[place] = other.failures[from];
        if !(self.feedback.is_empty() && other.feedback.is_empty()) {
            let mut feedback = self.all_feedback();
            feedback[place] = other.feedback(from).map(str::to_owned);
            self.feedback = feedback;
        }
    }

    /// Counts requests for scores that are not among these.
    pub fn add_requests(&mut self, requests: RewardRequests) {
        self.requests += requests;
    }

    /// Returns the scores at `places`, without the requests that they needed.
    #[must_use]
    pub fn select(&self, places: impl Iterator<Item = usize> + Clone) -> Self {
        Self {
            name: self.name.clone(),
            numbers: places.clone().map(|place| self.numbers[place]).collect(),
            feedback: match self.feedback.as_slice() {
                [] => Vec::new(),
                all => places.clone().map(|place| all[place].clone()).collect(),
            },
            failures: places.map(|place| self.failures[place]).collect(),
            requests: RewardRequests::default(),
        }
    }
}

impl Deref for Scores {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.numbers
    }
}

/// A reward's scores that are missing, or that its function did not compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardFaults {
    /// Completions on which the function exceeded its time.
    pub timeouts: usize,
    /// Completions on which the function ended or did not work.
    pub crashes: usize,
    /// Completions for which the function answered without a score.
    #[serde(default)]
    pub unscorable: usize,
    /// Completions without a score. If their other rewards are also missing, they do not train.
    pub excluded: usize,
}

impl RewardFaults {
    /// Returns true if all scores were computed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl std::ops::AddAssign for RewardFaults {
    fn add_assign(&mut self, other: Self) {
        self.timeouts += other.timeouts;
        self.crashes += other.crashes;
        self.unscorable += other.unscorable;
        self.excluded += other.excluded;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;
    use serde_json::Value;

    const SAMPLE: Sample = Sample {
        prompt: "say",
        messages: &[],
        completion: "yes",
        prompt_tokens: &[1],
        completion_tokens: &[2],
        finish_reason: FinishReason::StopToken,
        columns: &Value::Null,
        group: 0,
    };

    #[test]
    fn scores_must_be_as_many_as_samples() {
        let error = Scores::new(vec![0.0.into(); 2], &[SAMPLE; 3]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rewards: 2 scores for 3 samples, there must be one for each"
        );
    }

    #[test]
    fn missing_scores_and_failures_are_counted_apart() {
        let scores = [
            Score::from(1.),
            Score::NONE,
            Score::from(0.).after(ScoreFailure::Timeout),
            Score::NONE.after(ScoreFailure::Timeout),
            Score::NONE.after(ScoreFailure::Crash),
            Score::from(0.).after(ScoreFailure::Unscorable),
        ];
        let batch = Scores::new(scores.to_vec(), &[SAMPLE; 6]).unwrap();
        let (timeouts, crashes, unscorable, excluded) = (2, 1, 1, 3);
        let expected = RewardFaults {
            timeouts,
            crashes,
            unscorable,
            excluded,
        };
        assert_eq!(batch.faults(), expected);
        assert!(batch.iter_scores().eq(scores));
        let some = batch.select([4, 0].into_iter());
        assert!(some.iter_scores().eq([scores[4], scores[0]]));
    }
}
