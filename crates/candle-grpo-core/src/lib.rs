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
//! [`Advantages`] of sequences or tokens. [`AdvantagePipeline`] has a constructor for each
//! published estimator, and [`AdvantageConfig`] names them in configuration files. Implement the
//! trait for your own.
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
//! | module | contents |
//! | --- | --- |
//! | [`rewards`] | shaping before the advantage, score ensembles, length and repetition penalties |
//! | [`advantage`] | advantages of sequences and tokens, published estimators, whitening, returns |
//! | [`inputs`] | what an advantage or a loss declares that it needs |
//! | [`selection`] | dynamic sampling, filters of samples and tokens, resampling |
//! | [`trajectories`] | batches whose rows are steps of trajectories, GiGPO |
//! | [`kl`] | KL estimators with their gradients, adaptive KL coefficient |
//! | [`metrics`] | metrics that merge over micro-batches and workers |
//! | [`validate`] | the typed error of invalid options |
//!
//! Shapes: B sequences, P groups, T response tokens, K reward components. Statistics run in f64;
//! results are f32, or f64 for tensors in f64.

#![warn(clippy::missing_errors_doc)]

pub mod advantage;
pub mod dtype;
mod groups;
pub mod inputs;
pub mod kl;
mod mask;
pub mod metrics;
mod moments;
pub mod rewards;
mod schedule;
pub mod selection;
pub mod trajectories;
pub mod validate;

pub use advantage::{
    AdvantageBatch, AdvantageConfig, AdvantageEstimator, AdvantageName, AdvantagePipeline,
    Advantages, Baseline, GroupAdvantage, KlPenalty, Scale, SingletonGroup, TokenAdvantage,
    Whitening, reverse_recurrence,
};
pub use dtype::{arithmetic_dtype, statistics_dtype};
pub use groups::{GroupLayout, Groups};
pub use kl::{Kl, KlController, KlEstimator, KlGradient};
pub use mask::Mask;
pub use metrics::{MetricValue, MetricValues, Metrics};
pub use rewards::{
    CosineLength, CostPenalty, Costs, NonFinite, NormLevel, OverlongPenalty, RepetitionPenalty,
    RewardNorm, RewardShaping, RunningMoments, RunningState, ScoreEnsemble, StdCenter,
};
pub use schedule::{CoefSchedule, Decay};
pub use selection::{
    AdvantageRange, DifficultyPools, DynamicSampling, FilterBatch, GroupFilter, GroupSummary,
    SampleFilter, SamplingDecision, ScoreResampling, TaskScores,
};
pub use validate::Invalid;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
