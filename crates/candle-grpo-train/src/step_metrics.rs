//! The figures of one training step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{FinishReason, Rollout};

/// The figures of one training step: one line of `metrics.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the step, from 1.
    pub step: usize,
    /// Whether no update was made, since there was nothing to learn: no advantage other than 0, or no completion left.
    pub skipped: bool,
    /// The groups drawn. More than are in a step, if some were dropped.
    pub sampled_groups: usize,
    /// The groups that are left after [`Recipe::group_filter`](candle_grpo_loss::Recipe::group_filter).
    pub kept_groups: usize,
    /// The mean reward of all completions drawn, before any shaping.
    pub reward_mean: f64,
    /// The standard deviation of the rewards of all completions (of the population).
    pub reward_std: f64,
    /// The share of groups whose rewards are all equal: they teach nothing.
    pub constant_groups: f64,
    /// The mean length of the completions in tokens.
    pub response_length: f64,
    /// The share of completions that were cut at the greatest length.
    pub truncated: f64,
    /// The mean norm of the gradients before clipping. Absent if skipped, or if the critic trained alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// The learning rate. Absent where the norm is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// The figures of advantages and policy loss by name (`kl`, `entropy`, `clip_fraction`, ...). None if skipped.
    #[serde(flatten)]
    pub policy: BTreeMap<String, f64>,
    /// Seconds by phase.
    pub seconds: PhaseSeconds,
}

/// How long the phases of a step took, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// Drawing completions.
    pub sample: f64,
    /// Decoding and scoring them.
    pub score: f64,
    /// Log-probs, backward passes and optimiser steps.
    pub train: f64,
}

impl StepMetrics {
    /// What can be said before training.
    pub(crate) fn of_rollouts(
        step: usize,
        rollouts: &[Rollout],
        rewards: &[f32],
        num_generations: usize,
    ) -> Self {
        let n = rollouts.len() as f64;
        let mean = rewards.iter().copied().map(f64::from).sum::<f64>() / n;
        let squares: f64 = rewards.iter().map(|&r| (f64::from(r) - mean).powi(2)).sum();
        let groups = rewards.chunks(num_generations);
        let constant = groups.clone().filter(|g| g.iter().all(|r| r == &g[0]));
        let tokens: usize = rollouts.iter().map(|r| r.completion_tokens.len()).sum();
        let truncated = rollouts
            .iter()
            .filter(|r| r.finish_reason == FinishReason::Length);
        Self {
            step,
            sampled_groups: groups.len(),
            kept_groups: groups.len(),
            reward_mean: mean,
            reward_std: (squares / n).sqrt(),
            constant_groups: constant.count() as f64 / groups.len() as f64,
            response_length: tokens as f64 / n,
            truncated: truncated.count() as f64 / n,
            ..Self::default()
        }
    }
}
