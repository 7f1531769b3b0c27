//! Scores of rollouts.

use anyhow::{Result, ensure};

use super::weighted::total;
use super::{RewardFunction, Sample, Scores};
use crate::{Prompt, Rollout};

/// The rewards of some rollouts.
pub(crate) struct RolloutScores {
    /// The total of each rollout.
    pub(crate) total: Scores,
    /// The terms of the totals, at least one.
    pub(crate) components: Vec<Scores>,
}

/// The rewards of `rollouts`, which are groups of equal size, one for each of `prompts`.
/// `texts` are their decoded completions.
pub(crate) fn score_rollouts(
    function: &dyn RewardFunction,
    prompts: &[&Prompt],
    rollouts: &[Rollout],
    texts: &[String],
) -> Result<RolloutScores> {
    let num_generations = rollouts.len() / prompts.len().max(1);
    let samples: Vec<Sample> = rollouts
        .iter()
        .zip(texts)
        .enumerate()
        .map(|(i, (rollout, text))| {
            let group = i / num_generations;
            let prompt = prompts[group];
            Sample {
                prompt: &prompt.text,
                messages: &prompt.messages,
                completion: text,
                prompt_tokens: &rollout.prompt_tokens,
                completion_tokens: &rollout.completion.tokens,
                finish_reason: rollout.completion.finish_reason,
                columns: &prompt.columns,
                group,
            }
        })
        .collect();
    let components = function.components(&samples)?;
    ensure!(
        !components.is_empty()
            && components
                .iter()
                .all(|scores| scores.len() == samples.len()),
        "rewards: no components, or of another batch; there must be at least one, of {} scores",
        samples.len()
    );
    Ok(RolloutScores {
        total: Scores::new(total(&components, &samples), &samples)?,
        components,
    })
}
