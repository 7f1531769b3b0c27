//! Advantages for GRPO-family training with Candle: from rewards to advantages, as tensor
//! operations.
//!
//! Choose this crate if you have your own model and loop and need advantages, reward shaping or
//! sample selection. Add `candle-grpo-loss` for the policy loss. `candle-grpo-train` has a complete
//! trainer.
//!
//! Start with [`GroupAdvantage`]. Create it once, then call it with the rewards, the group size and
//! a scale:
//!
//! ```
//! use candle_grpo_core::{GroupAdvantage, Scale};
//!
//! let grpo = GroupAdvantage::grpo();
//! let advantages = grpo.compute(&[0.0, 1.0, 0.0, 1.0], 4, Scale::Group)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! An advantage says how much better a sample is than its baseline. A group with equal rewards gets
//! 0 and teaches nothing, so watch the fraction of such groups.
//!
//! # Next steps
//!
//! - To use another estimator, choose a constructor on [`AdvantagePipeline`], for example
//!   [`AdvantagePipeline::reinforce_plus_plus`]. A pipeline has a sequence stage, a token stage, or
//!   both. You can also read one from a configuration file.
//! - If an estimator needs more than rewards, pass an [`AdvantageBatch`] to
//!   [`AdvantageEstimator::estimate`]. It returns [`Advantages`] for sequences or tokens.
//! - To shape rewards first, use [`RewardShaping`]. To drop groups without a signal, use
//!   [`selection::DynamicSampling`].
//! - To write your own estimator, implement [`AdvantageEstimator`].
//!
//! # Devices
//!
//! Advantages are on the same device as the rewards. A slice or a `Vec` gives advantages on the
//! CPU, and a tensor on a GPU gives advantages there. For a batch on a GPU, the losses in
//! `candle-grpo-loss` also accept one advantage per sequence on the CPU. That crate also opens
//! devices.
//!
//! # Modules
//!
//! Most users only need the names at the root. The modules have the rest:
//!
//! | module | contents |
//! | --- | --- |
//! | [`rewards`] | normalization, score ensembles, length and repetition penalties |
//! | [`advantage`] | options for [`GroupAdvantage`] and [`TokenAdvantage`], whitening, returns |
//! | [`experimental`] | estimators that few projects use yet, which may change between releases |
//! | [`inputs`] | inputs that an advantage or a loss declares |
//! | [`selection`] | dynamic sampling, sample and token filters, resampling |
//! | [`trajectories`] | batches whose rows are steps in trajectories, GiGPO |
//! | [`kl`] | KL gradients, adaptive KL coefficient |
//! | [`schedule`] | coefficients that change during training |
//! | [`validate`] | option checks |
//!
//! # Compatibility
//!
//! Options are structs with public fields and a `Default`, and releases add fields. End a literal
//! with `..Default::default()` or a constructor. Enums that may grow, and results, are
//! `#[non_exhaustive]`.
//!
//! # Shapes and dtypes
//!
//! B sequences, P groups, T response tokens, K reward components. Statistics run in f64. Results
//! are f32, or f64 for f64 tensors.

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
pub use metrics::{MetricKind, MetricValue, MetricValues, Metrics};
pub use rewards::shaping::RewardShaping;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
