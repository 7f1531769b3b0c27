//! Sampler, rewards, actor and training loop for candle-grpo.
//!
//! Data flow; each arrow is a type or function that can be used alone:
//!
//! ```text
//! Prompt ──Sampler──▶ Rollout ──RewardFunction──▶ rewards ──────Recipe──────▶ advantages
//!                        │                                                       │
//!                        └──────────▶ TokenBatch ──▶ TrainingBatch ◀─────────────┘
//!                                                        │
//!                          Actor::forward_backward ◀─────┘
//!                          Actor::clip_grad_and_step
//! ```
//!
//! [`Trainer`] runs these stages in order, [`RunDir`] is the folder of a run, and [`pretrain`]
//! trains on examples. [`Pretrained`] is a model from a GGUF file or a Hugging Face folder with its
//! tokenizer and its [`ChatTemplate`].

pub mod data;
pub mod learn;
pub mod model;
mod owned_files;
pub mod progress;
mod random;
pub mod rewards;
pub mod rollout;
pub mod run;

pub use data::*;
pub use learn::*;
pub use model::*;
pub use progress::{Interrupted, NoProgress, Phase, Progress};
pub use rewards::{RewardConfig, RewardFunction, Sample, WeightedRewards};
pub use rollout::*;
pub use run::*;
