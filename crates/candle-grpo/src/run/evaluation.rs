//! Evaluation on held-out prompts.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_train::{Evaluation, Prompt, RewardFunction, Sampler, evaluate};
use tokenizers::Tokenizer;

use crate::config::EvaluationConfig;

/// Keeps the draws of evaluations apart from those of training steps, which count from 1. It is the same in all evaluations: they
/// differ by the policy only.
const STREAM: u64 = 0;

/// The answers of a policy to held-out prompts, of which `config` may want the first only.
pub fn evaluate_policy(
    sampler: &Sampler,
    prompts: &[Prompt],
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    config: &EvaluationConfig,
) -> Result<Evaluation> {
    let count = config.max_prompts.unwrap_or(usize::MAX).min(prompts.len());
    evaluate(
        sampler,
        &prompts[..count],
        config.samples_per_prompt,
        reward,
        tokenizer,
        STREAM,
    )
}

/// The figures of an evaluation that `config` asks for, besides mean reward and length: `pass_at_1` and so on.
pub fn evaluation_figures(
    evaluation: &Evaluation,
    config: &EvaluationConfig,
) -> Result<BTreeMap<String, f64>> {
    let pass_at = config.pass_at.iter();
    pass_at
        .map(|&k| {
            let chance = evaluation.pass_at(k, config.pass_reward)?;
            Ok((format!("pass_at_{k}"), chance))
        })
        .collect()
}
