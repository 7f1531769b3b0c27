//! Scores of rollouts.

use std::borrow::Cow;

use anyhow::{Context, Result, ensure};

use super::weighted::total;
use super::{RewardFunction, Sample, Score, Scores};
use crate::{Prompt, Rollout};

/// The rewards of some rollouts.
pub(crate) struct RolloutScores {
    /// The total of each rollout.
    pub(crate) total: Scores,
    /// The terms of the totals, at least one.
    pub(crate) components: Vec<Scores>,
}

/// The rewards of `rollouts`, which are groups of equal size, one for each of `prompts`.
/// `texts` are those of [`decode_answers`](crate::rollout::decode::decode_answers).
///
/// Functions receive the last turn of a trajectory as text, and the tokens that the policy wrote.
/// The sum of the rewards of its environment is the last component.
pub(crate) fn score_rollouts(
    function: &dyn RewardFunction,
    prompts: &[&Prompt],
    rollouts: &[Rollout],
    texts: &[String],
) -> Result<RolloutScores> {
    let num_generations = rollouts.len() / prompts.len().max(1);
    let tokens: Vec<Cow<'_, [u32]>> = rollouts
        .iter()
        .map(|rollout| rollout.completion.written_tokens())
        .collect();
    let samples: Vec<Sample> = rollouts
        .iter()
        .zip(texts)
        .zip(&tokens)
        .enumerate()
        .map(|(i, ((rollout, text), tokens))| {
            let group = i / num_generations;
            let prompt = prompts[group];
            Sample {
                prompt: &prompt.text,
                messages: &prompt.messages,
                completion: text,
                prompt_tokens: &rollout.prompt_tokens,
                completion_tokens: tokens,
                finish_reason: rollout.completion.finish_reason,
                columns: &prompt.columns,
                group,
            }
        })
        .collect();
    let mut components = function.components(&samples)?;
    let episodes = rollouts.iter().map(|rollout| rollout.episode.as_ref());
    let rewards = episodes.map(|episode| {
        let episode = episode.filter(|episode| episode.gives_rewards)?;
        Some(episode.reward() as f32)
    });
    if let Some(rewards) = rewards.collect::<Option<Vec<f32>>>() {
        let rewards = rewards.into_iter().map(Score::from).collect();
        let scores = Scores::new(rewards, &samples).context("environment")?;
        components.push(scores.named("environment"));
    }
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
