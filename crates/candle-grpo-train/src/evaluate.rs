//! How good a policy is, without training it.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::reward::{decode, score_rollouts, sums};
use crate::{FinishReason, Prompt, RewardFunction, Sampler};

/// The completions of an evaluation and their scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// One completion of each prompt, in the order of the prompts.
    pub samples: Vec<EvaluatedSample>,
}

/// A completion and its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluatedSample {
    /// The text of the prompt.
    pub prompt: String,
    /// The text of the completion, without special tokens.
    pub completion: String,
    /// The score.
    pub reward: f32,
    /// The length of the completion in tokens, the stop token included.
    pub response_length: usize,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}

impl Evaluation {
    /// The mean reward.
    pub fn reward_mean(&self) -> f64 {
        self.mean(|sample| f64::from(sample.reward))
    }

    /// The mean length of the completions in tokens.
    pub fn response_length_mean(&self) -> f64 {
        self.mean(|sample| sample.response_length as f64)
    }

    /// The mean of some figure of the samples.
    pub fn mean(&self, figure: impl Fn(&EvaluatedSample) -> f64) -> f64 {
        self.samples.iter().map(figure).sum::<f64>() / self.samples.len() as f64
    }
}

/// Draws one completion of each prompt and scores it. See [`Sampler::sample`] for `stream`.
pub fn evaluate(
    sampler: &Sampler,
    prompts: &[Prompt],
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    stream: u64,
) -> Result<Evaluation> {
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let rollouts = sampler.sample(&prompts, 1, stream)?;
    let texts = decode(&rollouts, tokenizer)?;
    let components = score_rollouts(reward, &prompts, &rollouts, &texts)?;
    let scores = sums(&components, rollouts.len());
    let samples = prompts
        .iter()
        .zip(rollouts)
        .zip(texts)
        .zip(scores)
        .map(
            |(((prompt, rollout), completion), reward)| EvaluatedSample {
                prompt: prompt.text.clone(),
                completion,
                reward,
                response_length: rollout.completion_tokens.len(),
                finish_reason: rollout.finish_reason,
            },
        )
        .collect();
    Ok(Evaluation { samples })
}
