//! Rewards and groups to advantages, as Candle tensor operations on the device of the tensor.
//!
//! The short way is an advantage function, made once and called with rewards, `num_generations` and a scale:
//!
//! ```
//! use candle_grpo_core::{GroupAdvantage, Scale};
//!
//! let grpo = GroupAdvantage::grpo();
//! let advantages = grpo.compute(&[0.0, 1.0, 0.0, 1.0], 4, Scale::Group)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! The general way is an [`AdvantageEstimator`]: an [`AdvantagePipeline`], which has every published estimator as a point
//! of one product of stages, baselines, scales and whitenings, or one of your own. It takes an [`AdvantageBatch`] and gives
//! advantages of sequences or of tokens. [`Gigpo`] is for batches whose rows are steps of trajectories. [`AdvantageConfig`] names the published ones for a configuration file.
//!
//! Before it: [`RewardShaping`] (shift, scale, normalise, clip), [`ScoreEnsemble`], penalties for length
//! ([`OverlongPenalty`]), truncation ([`TruncationPenalty`]) and repetition ([`RepetitionPenalty`]), [`ScoreResampling`]
//! and [`DynamicSampling`]. In it: [`TokenShaping`] (KL in the reward, returns, whitening, clipping) with [`Kl`] and
//! [`KlController`]. After it: [`SampleFilter`] and [`top_entropy_tokens_to_host`] say which samples and tokens are trained
//! on, and [`Metrics`] are figures that leave the device together.
//!
//! Shapes: B samples, P groups, T response tokens. Statistics run in f64; results are f32, or f64 for f64 tensors.

mod advantage_batch;
mod advantage_config;
mod advantage_estimator;
mod advantage_pipeline;
mod dynamic_sampling;
mod ensemble;
mod gigpo;
mod group_advantage;
mod groups;
mod kl;
mod kl_controller;
mod mask;
mod metrics;
mod moments;
mod nearest_key;
mod optimal_token_baseline;
mod overlong;
mod precision;
mod recurrence;
mod repetition;
mod resampling;
mod returns;
mod reward_norm;
mod reward_shaping;
mod rewards;
mod sample_filter;
mod sequence_advantage;
mod steps;
mod token_shaping;
mod top_entropy;
mod truncation;
mod whiten;

pub use advantage_batch::AdvantageBatch;
pub use advantage_config::AdvantageConfig;
pub use advantage_estimator::{AdvantageEstimator, Advantages};
pub use advantage_pipeline::AdvantagePipeline;
pub use dynamic_sampling::{DynamicSampling, GroupFilter, GroupSummary, SamplingDecision};
pub use ensemble::ScoreEnsemble;
pub use gigpo::{EpisodePopulation, Gigpo};
pub use group_advantage::{
    Baseline, BaselinePopulation, Compensation, Components, GroupAdvantage, GroupStatistics, Scale,
    SingleSample,
};
pub use groups::Groups;
pub use kl::{Kl, KlEstimator, KlGradient};
pub use kl_controller::KlController;
pub use mask::Mask;
pub use metrics::{MetricValue, MetricValues, Metrics};
pub use nearest_key::with_nearest_key;
pub use optimal_token_baseline::{OptimalTokenBaseline, TokenAlignment};
pub use overlong::OverlongPenalty;
pub use precision::{arithmetic_dtype, statistics_dtype};
pub use recurrence::reverse_recurrence;
pub use repetition::RepetitionPenalty;
pub use resampling::ScoreResampling;
pub use returns::MaskedTokens;
pub use reward_norm::{Level, RewardNorm, RunningMoments, RunningState};
pub use reward_shaping::{RewardShaping, ShapedRewards};
pub use rewards::{IntoRewards, NonFinite, RewardTensor};
pub use sample_filter::{FilterBatch, SampleFilter};
pub use sequence_advantage::SequenceAdvantage;
pub use steps::Steps;
pub use token_shaping::{KlPenalty, TokenAdvantages, TokenBaseline, TokenShaping};
pub use top_entropy::top_entropy_tokens_to_host;
pub use truncation::TruncationPenalty;
pub use whiten::{EpsilonPlacement, Whitening, masked_normalize, masked_whiten};
