//! The parts of trajectories that roles wrote.

use std::collections::BTreeSet;

use super::rollout_groups::RolloutGroups;
use crate::Rollout;
use crate::rollout::{Completion, Row};

/// Each role's part in the trajectories of a step. The parts that a role has in the trajectories
/// of one prompt are a group.
#[derive(Debug)]
pub(super) struct RoleGroups {
    /// The parts as completions with scores. A role's reward takes the place of the environment's.
    /// All groups have the same size: a role without a row in a trajectory has a part without
    /// tokens and without a score.
    pub(super) groups: RolloutGroups,
    /// Where each part is from.
    pub(super) parts: Vec<Part>,
}

/// A role in a trajectory.
#[derive(Debug)]
pub(super) struct Part {
    /// The trajectory's place in the step.
    pub(super) trajectory: usize,
    /// The role; empty for rows without one.
    pub(super) role: String,
    /// Its sequences, numbered over the rows of all trajectories.
    pub(super) sequences: Vec<usize>,
}

impl RoleGroups {
    /// The parts of all trajectories; `None` if no row has a role.
    pub(super) fn new(all: &RolloutGroups) -> Option<Self> {
        let names = all.rollouts.iter().flat_map(Rollout::roles);
        let names: BTreeSet<Option<&str>> = names.collect();
        if names.iter().all(Option::is_none) {
            return None;
        }
        let mut next = 0;
        let first = all.rollouts.iter().map(|rollout| {
            next += 1 + rollout.branches.len();
            next - 1 - rollout.branches.len()
        });
        let first: Vec<usize> = first.collect();
        let n = all.num_generations;
        let (mut parts, mut rollouts) = (Vec::new(), Vec::new());
        for group in 0..all.rows.len() {
            for &name in &names {
                let trajectories = all.rollouts.iter().zip(&first).enumerate();
                for (trajectory, (rollout, first)) in trajectories.skip(group * n).take(n) {
                    let own = rollout.roles().enumerate();
                    let own = own.filter(|(_, role)| *role == name);
                    let own: Vec<usize> = own.map(|(row, _)| row).collect();
                    rollouts.push(with_rows(rollout, &own));
                    parts.push(Part {
                        trajectory,
                        role: name.unwrap_or_default().to_owned(),
                        sequences: own.iter().map(|row| first + row).collect(),
                    });
                }
            }
        }
        let places = parts.iter().map(|part| part.trajectory);
        let components = all.components.iter();
        let mut components: Vec<_> = components.map(|c| c.select(places.clone())).collect();
        let mut scores: Vec<f32> = places.map(|place| all.scores[place]).collect();
        for (at, part) in parts.iter().enumerate() {
            if part.sequences.is_empty() {
                scores[at] = f32::NAN;
                components.iter_mut().for_each(|scores| scores.exclude(at));
            } else if let Some(reward) = part.reward(&all.rollouts[part.trajectory])
                && let Some(environment) = components.last_mut()
                && !environment[at].is_nan()
            {
                // The environment's rewards are the last component.
                scores[at] += reward - environment[at];
                environment.set(at, reward);
            }
        }
        let rows = all.rows.iter();
        let rows = rows.flat_map(|&row| std::iter::repeat_n(row, names.len()));
        let groups = RolloutGroups {
            num_generations: n,
            rows: rows.collect(),
            rollouts,
            scores,
            components,
            greedy_scores: None,
        };
        Some(Self { groups, parts })
    }
}

impl Part {
    /// The reward that the environment gave to this role alone.
    fn reward(&self, rollout: &Rollout) -> Option<f32> {
        let episode = rollout.episode.as_ref();
        let episode = episode.filter(|episode| episode.gives_rewards)?;
        let reward = episode.role_rewards.get(&self.role)?;
        Some(*reward as f32)
    }
}

/// The trajectory with these rows alone. Without any, it has no tokens.
fn with_rows(rollout: &Rollout, own: &[usize]) -> Rollout {
    let row = |&number: &usize| match rollout.branches.get(number) {
        Some(row) => row.clone(),
        None => Row {
            prompt_tokens: rollout.prompt_tokens.clone(),
            completion: rollout.completion.clone(),
            role: rollout.role.clone(),
        },
    };
    let mut branches: Vec<Row> = own.iter().map(row).collect();
    let last = branches.pop().unwrap_or_else(|| Row {
        prompt_tokens: Vec::new(),
        completion: Completion {
            tokens: Vec::new(),
            drawn_log_probs: Vec::new(),
            log_probs: None,
            written: None,
            weight_versions: Vec::new(),
            finish_reason: rollout.completion.finish_reason,
            experts: None,
        },
        role: None,
    });
    Rollout {
        prompt_index: rollout.prompt_index,
        sample_index: rollout.sample_index,
        prompt_tokens: last.prompt_tokens,
        completion: last.completion,
        role: last.role,
        episode: rollout.episode.clone(),
        branches,
    }
}
