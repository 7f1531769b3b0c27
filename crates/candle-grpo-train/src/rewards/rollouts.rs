//! Rollout scores.

use std::borrow::Cow;
use std::sync::Once;

use anyhow::{Context, Result, ensure};

use super::{RewardFunction, Sample, Score, Scores};
use crate::environment::Episode;
use crate::{Prompt, Rollout};
use candle_grpo_rewards::total;

/// Rewards for some rollouts.
pub(crate) struct RolloutScores {
    /// Each rollout's total.
    pub(crate) total: Scores,
    /// The terms in the totals, at least one.
    pub(crate) components: Vec<Scores>,
}

/// Scores `rollouts`, which are equally sized groups, one for each prompt in `prompts`. `texts`
/// come from [`decode_answers`](crate::rollout::decode::decode_answers).
///
/// Functions receive a trajectory's last turn as text, and the tokens that the policy wrote. The
/// environment's summed rewards are the last component. A trajectory that its environment excludes
/// has no score at all. One with a failure reward has no other score.
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
    warn_of_idle_winners(rollouts, num_generations);
    leave_out(&mut components, rollouts, Episode::has_failure_reward);
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
    leave_out(&mut components, rollouts, |episode| episode.excluded);
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

/// Leaves out the scores of the trajectories for which `without` returns true.
fn leave_out(components: &mut [Scores], rollouts: &[Rollout], without: fn(&Episode) -> bool) {
    for (place, rollout) in rollouts.iter().enumerate() {
        if rollout.episode.as_ref().is_some_and(without) {
            components
                .iter_mut()
                .for_each(|scores| scores.exclude(place));
        }
    }
}

/// Warns, once per process, if a trajectory without any reward is the best in its group. The
/// environment then only gave negative rewards, and the policy learns to do nothing.
fn warn_of_idle_winners(rollouts: &[Rollout], num_generations: usize) {
    static WARNED: Once = Once::new();
    let has_idle_winner = |group: &[Rollout]| {
        let episodes = group.iter().filter_map(|rollout| rollout.episode.as_ref());
        let counted = episodes.filter(|episode| episode.gives_rewards && !episode.excluded);
        let (idle, others): (Vec<&Episode>, Vec<&Episode>) =
            counted.partition(|episode| episode.unrewarded && episode.failure().is_none());
        let rewards = |episodes: &[&Episode]| {
            let rewards = episodes.iter().map(|episode| episode.reward());
            rewards.max_by(f64::total_cmp)
        };
        match (rewards(&idle), rewards(&others)) {
            (Some(idle), Some(others)) => others < 0. && idle > others,
            _ => false,
        }
    };
    if rollouts.chunks(num_generations.max(1)).any(has_idle_winner) {
        WARNED.call_once(|| {
            tracing::warn!(
                "a trajectory to which the environment gave no reward counts more than all others \
                 of its prompt, which have negative rewards; environment.limits.missing_reward \
                 sets its reward, and null excludes it"
            );
        });
    }
}
