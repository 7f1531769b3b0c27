//! Evaluation on held-out prompts.

use anyhow::Result;
use candle_grpo_train::progress::Phase;
use candle_grpo_train::run::Evaluation;
use candle_grpo_train::{Progress, Prompt, RewardFunction, Sampler, evaluate};
use tokenizers::Tokenizer;

use crate::config::EvaluationConfig;

/// Keeps evaluation random numbers apart from training steps, which count from 1. All evaluations
/// use the same ones, so only the policy differs.
const STREAM: u64 = 0;

/// Evaluates a policy on the held-out prompts that `config` selects.
pub fn evaluate_policy(
    sampler: &Sampler,
    prompts: &[Prompt],
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    config: &EvaluationConfig,
    progress: &dyn Progress,
) -> Result<Evaluation> {
    let (prompts, samples) = (config.select(prompts), config.samples_per_prompt);
    progress.begin(Phase::Evaluate, prompts.len().saturating_mul(samples));
    evaluate(sampler, prompts, samples, reward, tokenizer, STREAM)
}
