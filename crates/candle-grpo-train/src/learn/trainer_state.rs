//! A run's state in memory.

use crate::TrainConfig;
use crate::rollout::UnfinishedGroup;
use candle_grpo_core::advantage::RoleBaselines;
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::RunningState;
use candle_grpo_core::selection::TaskScores;
use candle_grpo_loss::AdaptiveEntropy;
use serde::{Deserialize, Serialize};

/// State that [`Trainer`](crate::Trainer) steps change, except weights and optimizers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Number of steps, including skipped ones.
    pub steps: usize,
    /// Number of steps without an update.
    pub skipped_steps: usize,
    /// Number of visited positions in the prompt order, or row order.
    pub visited: usize,
    /// Number of visited positions in the demonstration order.
    #[serde(default)]
    pub visited_demonstrations: usize,
    /// Mean and variance of rewards across steps.
    pub running_moments: Option<RunningState>,
    /// Each role's mean reward, with [`TrainConfig::role_baselines`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role_baselines: Option<RoleBaselines>,
    /// Controller for the KL penalty coefficient in rewards.
    pub reward_kl: Option<KlController>,
    /// Controller for the entropy bonus coefficient.
    pub adaptive_entropy: Option<AdaptiveEntropy>,
    /// Each prompt's latest mean reward, for a curriculum.
    pub task_scores: Option<TaskScores>,
    /// Groups to continue in later steps, with
    /// [`RolloutConfig::partial`](crate::rollout::RolloutConfig::partial).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unfinished_groups: Vec<UnfinishedGroup>,
}

impl TrainerState {
    /// Creates the state before the first step.
    pub fn new(config: &TrainConfig) -> Self {
        let norm = &config.recipe.reward_shaping.norm;
        Self {
            running_moments: norm.is_running().then(RunningState::default),
            role_baselines: config.role_baselines.clone(),
            reward_kl: config.reward_kl,
            adaptive_entropy: config.adaptive_entropy,
            ..Self::default()
        }
    }
}
