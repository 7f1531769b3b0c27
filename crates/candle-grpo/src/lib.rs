//! GRPO training for language models on Candle, in one crate: the libraries under short names, and
//! the runs behind the program `grpo`.
//!
//! | module | contents |
//! | --- | --- |
//! | `agents`, with the feature `agents` | your own programs, which call the policy over HTTP |
//! | `tinker`, with the feature `tinker` | a server with the API of Tinker, for loops in Python |
//! | [`base`] | what the libraries share: atomic files, progress and cancellation |
//! | [`collective`] | operations between the processes in a job |
//! | [`core`] | advantages from rewards and groups |
//! | [`hub`] | Hugging Face hub models and data sets |
//! | [`kernels`] | fused operators with backward passes |
//! | [`loss`] | per-token log-probs and policy losses |
//! | [`nn`] | a trainable decoder, the optimizer, gradient accumulation and clipping |
//! | [`rewards`] | reward functions |
//! | [`train`] | data, sampler, rewards, trainer, run directory |
//! | [`config`] | a run from a YAML or TOML file |
//! | [`run`] | training, evaluation, checkpoints and resumption |
//! | [`suite`] | evaluation suites and paired comparisons |
//! | [`report`] | one page about runs |

#[cfg(feature = "agents")]
pub use candle_grpo_agents as agents;
pub use candle_grpo_base as base;
pub use candle_grpo_collective as collective;
pub use candle_grpo_core as core;
pub use candle_grpo_hub as hub;
pub use candle_grpo_kernels as kernels;
pub use candle_grpo_loss as loss;
pub use candle_grpo_nn as nn;
pub use candle_grpo_rewards as rewards;
#[cfg(feature = "tinker")]
pub use candle_grpo_tinker as tinker;
pub use candle_grpo_train as train;

pub mod config;
pub mod report;
pub mod run;
pub mod suite;
