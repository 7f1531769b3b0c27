//! Completions for prompts, and their scores.

use anyhow::Result;
use candle_grpo_nn::ModelConfig;
use tokenizers::Tokenizer;

use super::RolloutGroups;
use crate::rewards::score_rollouts;
use crate::rollout::decode::decode_answers;
use crate::{Prompt, RewardFunction, Sampler, SamplingConfig};

/// Samples `num_generations` completions for each prompt in `prompts`, without scores. `stream`
/// separates calls that otherwise have the same seed, such as those in different steps.
///
/// If several ranks share the sampler, each one samples its part of the prompts.
///
/// # Errors
///
/// Same as [`Sampler::sample`].
pub fn collect<C: ModelConfig>(
    sampler: &Sampler<C>,
    prompts: &[&Prompt],
    num_generations: usize,
    stream: u64,
) -> Result<RolloutGroups> {
    let share = sampler.share(prompts.len());
    let mut groups = RolloutGroups::none(num_generations);
    if prompts.is_empty() || !share.is_empty() {
        groups.rollouts = sampler.sample_part(prompts, num_generations, stream, share.clone())?;
        groups.rows = share.collect();
    }
    Ok(groups)
}

/// Scores the completions from [`collect`] with `reward`, and replaces their scores. Pass the same
/// `prompts` as to [`collect`], and its sampler's settings as `sampling`.
///
/// # Errors
///
/// Fails if the reward function fails, or a completion cannot be decoded.
pub fn score(
    groups: &mut RolloutGroups,
    prompts: &[&Prompt],
    reward: &dyn RewardFunction,
    sampling: &SamplingConfig,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let texts = decode_answers(&groups.rollouts, sampling, tokenizer)?;
    let prompts: Vec<&Prompt> = groups.rows.iter().map(|&row| prompts[row]).collect();
    let scores = score_rollouts(reward, &prompts, &groups.rollouts, &texts)?;
    groups.scores = scores.total.into_vec();
    groups.components = scores.components;
    Ok(())
}
