//! Length-dependent rewards for right answers.

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_core::rewards::CosineLength;
use serde_json::Value;

use super::{RewardFunction, Sample, Score, Scores, Votes};
use crate::Progress;

/// A reward on an answer's length, after another reward function decides whether it is right.
///
/// Use it if right answers become longer than they need to be. Try [`LengthScale::Relative`] first:
/// it needs no target length.
pub struct LengthScaledReward {
    scale: LengthScale,
    correct: Box<dyn RewardFunction>,
    min_score: f32,
}

/// Dependence on the length of a right or wrong answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LengthScale {
    /// On the length alone.
    Cosine(CosineLength),
    /// On the lengths of all completions for the prompt, as in Kimi k1.5
    /// (<https://arxiv.org/abs/2501.12599>).
    ///
    /// It is `0.5 - (length - shortest) / (longest - shortest)` for a right answer. For a wrong one
    /// it is the same, but at most 0. It is 0 if all lengths are equal. Completions that the other
    /// function gives no score are not compared.
    Relative,
}

impl LengthScaledReward {
    /// Creates the reward. An answer is right if its score from `correct` is at least `min_score`.
    /// It has no score if `correct` returns none.
    pub fn new(scale: LengthScale, correct: Box<dyn RewardFunction>, min_score: f32) -> Self {
        Self {
            scale,
            correct,
            min_score,
        }
    }
}

impl RewardFunction for LengthScaledReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(self.scores(samples)?.iter_scores().collect())
    }

    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        let judged = self.correct.scores(samples)?;
        let (requests, feedback) = (judged.requests(), judged.all_feedback());
        let judged: Vec<Score> = judged.iter_scores().collect();
        let mut scores = Vec::with_capacity(samples.len());
        for group in samples.chunk_by(|a, b| a.group == b.group) {
            let judged = &judged[scores.len()..][..group.len()];
            let lengths = group.iter().map(|sample| sample.completion_tokens.len());
            let compared = lengths.clone().zip(judged);
            let compared = compared.filter_map(|(length, score)| score.value().and(Some(length)));
            let scale = self.scale.of_group(compared.collect());
            for (length, score) in lengths.zip(judged) {
                let (right, wrong) = (scale(length, true)?, scale(length, false)?);
                scores.push(score.map(|score| {
                    if score >= self.min_score {
                        right
                    } else {
                        wrong
                    }
                }));
            }
        }
        let scores = Scores::new(scores, samples)?.with_feedback(feedback)?;
        Ok(scores.with_requests(requests))
    }

    /// Returns the votes from the function that decides whether answers are right.
    fn votes(&self, completions: &[&str], columns: &Value) -> Result<Option<Votes>> {
        self.correct.votes(completions, columns)
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.correct.set_progress(progress);
    }

    fn set_clock(&mut self, now: &str) -> Result<()> {
        self.correct.set_clock(now)
    }

    fn finish(&self) -> Result<()> {
        self.correct.finish()
    }
}

impl LengthScale {
    /// Returns the reward by length and correctness, for completions with these lengths.
    fn of_group(self, lengths: Vec<usize>) -> impl Fn(usize, bool) -> Result<f32> {
        let shortest = lengths.iter().copied().min().unwrap_or(0);
        let longest = lengths.into_iter().max().unwrap_or(0);
        move |length, is_right| match self {
            Self::Cosine(scale) => Ok(scale.compute(length, is_right)? as f32),
            Self::Relative if longest == shortest => Ok(0.),
            Self::Relative => {
                let place = (length as f32 - shortest as f32) / (longest - shortest) as f32;
                let shorter_is_better = 0.5 - place;
                Ok(if is_right {
                    shorter_is_better
                } else {
                    shorter_is_better.min(0.)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;
    /// Samples in two groups: text, number of tokens, group.
    fn samples() -> Vec<Sample<'static>> {
        const TOKENS: [u32; 100] = [1; 100];
        let sample = |(completion, length, group): (&'static str, usize, usize)| Sample {
            prompt: "",
            messages: &[],
            completion,
            prompt_tokens: &[1],
            completion_tokens: &TOKENS[..length],
            finish_reason: FinishReason::StopToken,
            columns: &Value::Null,
            group,
        };
        [
            ("right", 10, 0),
            ("right", 60, 0),
            ("wrong", 10, 0),
            ("wrong", 35, 0),
            ("none", 90, 0),
            ("right", 50, 1),
            ("wrong", 50, 1),
        ]
        .map(sample)
        .to_vec()
    }

    struct Word;

    impl RewardFunction for Word {
        fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
            let score = |sample: &Sample| match sample.completion {
                "right" => Score::from(0.8),
                "wrong" => Score::from(0.4),
                _ => Score::NONE,
            };
            Ok(samples.iter().map(score).collect())
        }
    }

    #[test]
    fn short_right_answers_score_most_by_the_cosine() {
        let scale = CosineLength {
            max_length: 60,
            ..CosineLength::default()
        };
        let reward = LengthScaledReward::new(LengthScale::Cosine(scale), Box::new(Word), 0.8);
        let scores = reward.score(&samples()).unwrap();
        let expected = |length, is_correct| scale.compute(length, is_correct).unwrap() as f32;
        assert_eq!(scores[0], expected(10, true));
        assert_eq!(scores[1], 0.5);
        assert_eq!(scores[2], expected(10, false));
        assert_eq!(scores[4], Score::NONE);
        // Nothing reaches 0.9.
        let strict = LengthScaledReward::new(LengthScale::Cosine(scale), Box::new(Word), 0.9);
        assert_eq!(strict.score(&samples()).unwrap()[1], -0.5);
    }

    #[test]
    fn lengths_are_compared_in_each_group() {
        let reward = LengthScaledReward::new(LengthScale::Relative, Box::new(Word), 0.8);
        let scores = reward.score(&samples()).unwrap();
        assert_eq!(scores[..4], [0.5, -0.5, 0., 0.]);
        assert_eq!(scores[4], Score::NONE);
        assert_eq!(scores[5..], [0., 0.]);
    }
}
