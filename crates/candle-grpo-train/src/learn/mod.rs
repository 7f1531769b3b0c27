//! The training loop: batches, policy, critic, reference and the steps over them.

mod actor;
mod ahead;
mod batch;
mod collector;
mod collector_progress;
mod critic;
mod generator_access;
pub(crate) mod micro_batches;
pub(crate) mod models;
pub(crate) mod not_finite;
mod padding;
mod pretrain;
pub(crate) mod ranks;
mod recipe_inputs;
pub(crate) mod reference;
pub(crate) mod response_forward;
mod schedule;
mod scored_rollouts;
mod snapshot;
mod staleness;
mod step_batch;
mod step_metrics;
mod train_config;
mod trainer;

pub use actor::{Actor, ActorConfig, ComputeDType, StepStats};
pub use batch::{TokenBatch, TrainingBatch, count_prompt_tokens, rollout_log_probs};
pub use critic::{Critic, CriticConfig, explained_variance};
pub use not_finite::NotFinite;
pub use pretrain::{Example, PretrainConfig, pretrain};
pub use ranks::Ranks;
pub use reference::{Reference, ReferenceRefresh};
pub use response_forward::read_tokens;
pub use schedule::LearningRateSchedule;
pub use step_metrics::{PhaseSeconds, StepMetrics};
pub use train_config::{OldLogProbs, TrainConfig};
pub use trainer::Trainer;
