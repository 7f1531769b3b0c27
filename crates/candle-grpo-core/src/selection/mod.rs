//! Selection for training: groups, samples and tokens.
//!
//! If groups often have equal rewards, start with [`DynamicSampling`]. If truncated answers disturb
//! training, add a [`SampleFilter`].

mod difficulty_pools;
mod dynamic_sampling;
mod resampling;
mod sample_filter;
mod top_entropy;

pub use difficulty_pools::{AdvantageRange, DifficultyPools, TaskScores};
pub use dynamic_sampling::{DynamicSampling, GroupFilter, GroupSummary, SamplingDecision};
pub use resampling::ScoreResampling;
pub use sample_filter::{FilterBatch, SampleFilter};
pub use top_entropy::top_entropy_tokens;
