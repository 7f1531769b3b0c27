//! Advantages for GRPO-family training, as Candle tensor operations on the device of the tensor.
//!
//! Create an advantage function once, then call it with the rewards, the group size and a scale:
//!
//! ```
//! use candle_grpo_core::{GroupAdvantage, Scale};
//!
//! let grpo = GroupAdvantage::grpo();
//! let advantages = grpo.compute(&[0.0, 1.0, 0.0, 1.0], 4, Scale::Group)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`AdvantageEstimator`] is the general interface: it takes an [`AdvantageBatch`] and returns
//! [`Advantages`] of sequences or tokens. [`AdvantagePipeline`] composes a stage of
//! sequences and a stage of tokens. It has a constructor for each published estimator, and is their
//! form in configuration files. Implement the trait for your own.
//!
//! # Devices
//!
//! Advantages are on the device of the rewards. Rewards in a slice or a `Vec` give advantages on
//! the CPU, and rewards in a tensor on a GPU give advantages there. For a batch on a GPU, the
//! losses of `candle-grpo-loss` also accept one advantage per sequence on the CPU. That crate opens
//! devices.
//!
//! # Modules
//!
//! The names at the root are those that most users need. All others are in modules:
//!
//! | module | contents |
//! | --- | --- |
//! | [`rewards`] | parts of the shaping before the advantage, score ensembles, length and repetition penalties |
//! | [`advantage`] | options of [`GroupAdvantage`] and [`TokenAdvantage`], whitening, returns |
//! | [`experimental`] | estimators that few projects use yet, which may change between releases |
//! | [`inputs`] | what an advantage or a loss declares that it needs |
//! | [`selection`] | dynamic sampling, filters of samples and tokens, resampling |
//! | [`trajectories`] | batches whose rows are steps of trajectories, GiGPO |
//! | [`kl`] | gradients of KL estimators, adaptive KL coefficient |
//! | [`schedule`] | coefficients that change over the steps of a run |
//! | [`validate`] | checks of options |
//!
//! # Compatibility
//!
//! Options are structs with public fields and a `Default`, and releases add fields: end a literal
//! with `..Default::default()` or a constructor. Enums that may grow, and results, are
//! `#[non_exhaustive]`.
//!
//! Shapes: B sequences, P groups, T response tokens, K reward components. Statistics run in f64;
//! results are f32, or f64 for tensors in f64.

#![warn(clippy::missing_errors_doc)]

pub mod advantage;
pub mod dtype;
pub mod experimental;
mod groups;
pub mod inputs;
mod invalid;
pub mod kl;
mod mask;
mod metrics;
mod moments;
pub mod rewards;
pub mod schedule;
pub mod selection;
pub mod trajectories;
pub mod validate;

pub use advantage::batch::AdvantageBatch;
pub use advantage::estimator::{AdvantageEstimator, Advantages};
pub use advantage::group::GroupAdvantage;
pub use advantage::group_options::Scale;
pub use advantage::pipeline::AdvantagePipeline;
pub use advantage::token::TokenAdvantage;
pub use groups::{GroupLayout, Groups};
pub use invalid::Invalid;
pub use kl::estimator::{Kl, KlEstimator};
pub use mask::Mask;
pub use metrics::{MetricValue, MetricValues, Metrics};
pub use rewards::shaping::RewardShaping;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
