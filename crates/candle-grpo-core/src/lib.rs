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

pub mod advantage;
pub mod dtype;
mod groups;
pub mod kl;
mod mask;
pub mod metrics;
mod moments;
mod nearest_key;
pub mod rewards;
pub mod selection;
pub mod trajectories;
pub mod validate;

pub use advantage::{
    AdvantageBatch, AdvantageConfig, AdvantageEstimator, AdvantagePipeline, Advantages, Baseline,
    BaselinePopulation, Compensation, Components, EpsilonPlacement, GroupAdvantage,
    GroupStatistics, KlPenalty, MaskedTokens, OptimalTokenBaseline, Scale, SequenceAdvantage,
    SingleSample, TokenAdvantages, TokenAlignment, TokenBaseline, TokenShaping, Whitening,
    masked_normalize, masked_whiten, reverse_recurrence,
};
pub use dtype::{arithmetic_dtype, statistics_dtype};
pub use groups::Groups;
pub use kl::{Kl, KlController, KlEstimator, KlGradient};
pub use mask::Mask;
pub use metrics::{MetricValue, MetricValues, Metrics};
pub use nearest_key::with_nearest_key;
pub use rewards::{
    IntoRewards, Level, NonFinite, OverlongPenalty, RepetitionPenalty, RewardNorm, RewardShaping,
    RewardTensor, RunningMoments, RunningState, ScoreEnsemble, ShapedRewards, TruncationPenalty,
};
pub use selection::{
    DynamicSampling, FilterBatch, GroupFilter, GroupSummary, SampleFilter, SamplingDecision,
    ScoreResampling, top_entropy_tokens_to_host,
};
pub use trajectories::{EpisodePopulation, Gigpo, Steps};
pub use validate::Invalid;
