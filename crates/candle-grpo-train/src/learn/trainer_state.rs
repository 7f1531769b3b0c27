//! The state of a run in memory.

use crate::TrainConfig;
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::RunningState;
use candle_grpo_core::selection::TaskScores;
use candle_grpo_loss::AdaptiveEntropy;
use serde::{Deserialize, Serialize};

/// The state that the steps of a [`Trainer`](crate::Trainer) change, except weights and optimizers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// The number of steps, skipped ones included.
    pub steps: usize,
    /// The number of steps without an update.
    pub skipped_steps: usize,
    /// The number of visited positions in the order of prompts, or of rows.
    pub visited: usize,
    /// The number of visited positions in the order of demonstrations.
    #[serde(default)]
    pub visited_demonstrations: usize,
    /// Mean and variance of the rewards over the steps.
    pub running_moments: Option<RunningState>,
    /// The controller of the coefficient of the KL penalty in rewards.
    pub reward_kl: Option<KlController>,
    /// The controller of the coefficient of the entropy bonus.
    pub adaptive_entropy: Option<AdaptiveEntropy>,
    /// The latest mean reward of each prompt, for a curriculum.
    pub task_scores: Option<TaskScores>,
}

impl TrainerState {
    /// Creates the state before the first step.
    pub fn new(config: &TrainConfig) -> Self {
        let norm = &config.recipe.reward_shaping.norm;
        Self {
            running_moments: norm.is_running().then(RunningState::default),
            reward_kl: config.reward_kl,
            adaptive_entropy: config.adaptive_entropy,
            ..Self::default()
        }
    }
}
