//! GRPO training of language models on Candle, in one crate: the libraries under short names, and
//! the runs of the program `grpo`.
//!
//! | module | contents |
//! | --- | --- |
//! | [`collective`] | operations between the processes of a job |
//! | [`core`] | advantages from rewards and groups |
//! | [`kernels`] | fused operators with backward passes |
//! | [`loss`] | per-token log-probs and policy losses |
//! | [`nn`] | a trainable decoder, the optimizer, gradient accumulation and clipping |
//! | [`train`] | data, sampler, rewards, trainer, run directory |
//! | [`config`] | a run from a file of YAML or TOML |
//! | [`run`] | training, evaluation, checkpoints and resumption of a run |
//! | [`suite`] | evaluation suites and paired comparisons |
//! | [`report`] | one page about runs |

pub use candle_grpo_collective as collective;
pub use candle_grpo_core as core;
pub use candle_grpo_kernels as kernels;
pub use candle_grpo_loss as loss;
pub use candle_grpo_nn as nn;
pub use candle_grpo_train as train;

pub mod config;
pub mod report;
pub mod run;
pub mod suite;
