//! GRPO training of language models on Candle, in one crate: the libraries by their short names, and the configuration of the
//! program `grpo`.
//!
//! | module | |
//! | --- | --- |
//! | [`core`] | rewards and groups to advantages |
//! | [`loss`] | token log-probs, and the policy loss |
//! | [`nn`] | a trainable decoder, optimiser, gradient accumulation and clipping |
//! | [`train`] | data, sampler, rewards, trainer, run directory |
//! | [`config`] | a whole run from a file of YAML or TOML |
//! | [`run`] | the run of a configuration: train, evaluate, save, resume |
//! | [`report`] | one page about runs |

pub use candle_grpo_core as core;
pub use candle_grpo_loss as loss;
pub use candle_grpo_nn as nn;
pub use candle_grpo_train as train;

pub mod config;
pub mod report;
pub mod run;
