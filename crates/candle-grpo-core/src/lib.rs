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
//! Around it: [`RewardShaping`] before (shift, scale, normalise, clip), [`TokenShaping`] after (KL in the reward,
//! returns, whitening, clipping), [`Kl`] for the estimators of the Kullback-Leibler divergence and [`Metrics`] for
//! figures that leave the device together.
//!
//! Shapes: B samples, P groups, T response tokens. Statistics run in f64; results are f32, or f64 for f64 tensors.

mod group_advantage;
mod groups;
mod kl;
mod mask;
mod metrics;
mod moments;
mod precision;
mod recurrence;
mod reward_norm;
mod reward_shaping;
mod rewards;
mod token_shaping;
mod whiten;

pub use group_advantage::{Baseline, GroupAdvantage, GroupStatistics, Scale, SingleSample};
pub use groups::Groups;
pub use kl::{Kl, KlEstimator, KlGradient};
pub use mask::Mask;
pub use metrics::{MetricValue, MetricValues, Metrics};
pub use precision::{result_dtype, statistics_dtype};
pub use recurrence::reverse_recurrence;
pub use reward_norm::{Level, RewardNorm, RunningMoments, RunningState};
pub use reward_shaping::{RewardShaping, ShapedRewards};
pub use rewards::{IntoRewards, NonFinite, RewardTensor};
pub use token_shaping::{KlPenalty, TokenAdvantages, TokenShaping};
pub use whiten::{masked_normalize, masked_whiten};
