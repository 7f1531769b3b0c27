//! Trains language models with GRPO-family algorithms: sampler, rewards, policy and training loop.
//!
//! Choose this crate to train from Rust, with your own reward, environment, generator or model. To
//! train from a configuration file, use the program `grpo` in `candle-grpo`. If you have your own
//! training loop, `candle-grpo-core` and `candle-grpo-loss` may be enough.
//!
//! # Start here
//!
//! 1. Load a model and its tokenizer with [`Pretrained`].
//! 2. Make a [`Prompt`] per question, and write a reward: a closure that scores a [`Sample`].
//! 3. Pass them to [`TrainerParts::new`] with a [`TrainConfig`], create a [`Trainer`], and call
//!    [`Trainer::step`] in a loop.
//! 4. To save metrics and checkpoints, and to resume, create a [`RunDir`].
//!
//! Each step returns [`StepMetrics`]. Watch `reward_mean` first. If it does not rise, check
//! `constant_groups`: the fraction of groups with equal rewards, which teach nothing. Near 1, the
//! prompts are too easy or too hard for the policy.
//!
//! # Data flow
//!
//! [`Trainer`] runs these stages in order. Each arrow is a type or function that you can use alone:
//!
//! ```text
//! Prompt ──Sampler──▶ Rollout ──RewardFunction──▶ rewards ──────Recipe──────▶ advantages
//!                        │                                                       │
//!                        └── Sequence ─▶ TokenBatch ──▶ TrainingBatch ◀──────────┘
//!                                                        │
//!                          Actor::forward_backward ◀─────┘
//!                          Actor::clip_grad_and_step
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`data`] | data rows, their prompts, prompt order |
//! | [`model`] | tokenizers, special tokens, chat templates, models with all of these |
//! | [`rollout`] | generators, sampling, completions |
//! | [`environment`] | multi-turn trajectories, tools |
//! | [`rewards`] | the trait, reward functions, weighted sums |
//! | [`sequence`] | tokens and values for completions and rows, on the host |
//! | [`learn`] | batches, policy, critic, reference, trainer |
//! | [`sft`] | supervised fine-tuning: rows, assistant masks, trainer |
//! | [`hub`] | models and data sets on the Hugging Face hub |
//! | [`run`] | run directories and checkpoints, evaluation, TensorBoard |
//! | [`statistics`] | estimators, intervals and tests for evaluations |
//! | [`progress`] | progress reports and cancellation for a step |
//!
//! Functions return [`anyhow::Error`]. [`ErrorKind::of`] is its kind, which you can match on.

mod bisection;
mod canonical_json;
mod checksums;
mod config_json;
pub mod data;
mod detached;
pub mod environment;
mod error_kind;
mod excerpt;
mod folder_lock;
pub mod learn;
pub mod model;
mod not_finite;
mod one_or_more;
mod owned_files;
mod random;
mod ranks;
pub mod rewards;
pub mod rollout;
pub mod run;
mod sampler;
pub mod sequence;
pub mod sft;
pub mod statistics;
mod step_record;
mod teacher;

pub use candle_grpo_base::secrets::hide_from_programs;
pub use candle_grpo_base::{Interrupted, Progress, find_invalid, progress};
pub use candle_grpo_hub as hub;
pub use candle_grpo_kernels::{
    DeviceMemory, cuda_device, cuda_device_count, cuda_is_enabled, cuda_memory, default_device,
    release_cuda_memory,
};
pub use candle_grpo_nn::{ActivationCheckpointing, ComputeDType};
pub use data::{Dataset, DatasetConfig, Prompt};
pub use error_kind::ErrorKind;
pub use learn::{
    Actor, ActorConfig, Critic, CriticConfig, StepMetrics, TrainConfig, Trainer, TrainerParts,
    TrainingBatch,
};
pub use model::{ChatTemplate, Pretrained};
pub use not_finite::NotFinite;
pub use rewards::{RewardConfig, RewardFunction, Sample, WeightedRewards};
pub use rollout::{Completion, FinishReason, Generator, Rollout, SamplingConfig};
pub use run::{RunDir, evaluate};
pub use sampler::Sampler;
pub use sequence::{Sequence, TokenBatch};

/// Default factor, for serde.
fn one() -> f64 {
    1.
}
