//! The training loop: batches, policy, critic, reference and the steps over them.

pub(crate) mod actor;
mod ahead;
mod batch;
mod blame;
mod checkpoint;
mod collector;
mod collector_progress;
mod critic;
mod demonstrations;
mod distillation;
mod generator_access;
mod gradient_descent;
pub(crate) mod memory_plan;
pub(crate) mod micro_batches;
pub(crate) mod models;
mod needs;
mod parts;
pub(crate) mod reference;
pub(crate) mod rollout_groups;
pub(crate) mod rollout_log;
mod schedule;
mod snapshot;
mod staleness;
pub mod step;
mod step_metrics;
mod supervised;
mod train_config;
mod trainer;
pub(crate) mod trainer_state;
mod turn_advantage;

pub use crate::not_finite::NotFinite;
pub use crate::ranks::Ranks;
pub use crate::sequence::{count_prompt_tokens, read_tokens};
pub use crate::teacher::{Teacher, TeacherDistributions};
pub use actor::{Actor, ActorConfig, StepStats};
pub use batch::TrainingBatch;
pub use candle_grpo_nn::ComputeDType;
pub use critic::{Critic, CriticConfig, explained_variance};
pub use demonstrations::{DemonstrationConfig, Demonstrations};
pub use memory_plan::{Draws, MemoryPlan};
pub use models::Models;
pub use parts::TrainerParts;
pub use reference::{Reference, ReferenceRefresh};
pub use rollout_groups::rollout_log_probs;
pub use rollout_log::{
    BranchPlace, RolloutBranch, RolloutLogConfig, RolloutRecord, RolloutTurn, TurnRole,
};
pub use schedule::LearningRateSchedule;
pub use step_metrics::{PhaseSeconds, RewardStatistics, StepMetrics};
pub use supervised::LikelihoodSums;
pub use train_config::{OldLogProbs, TrainConfig};
pub use trainer::Trainer;
pub use trainer_state::TrainerState;
pub use turn_advantage::{StepReturns, TurnAdvantage};
