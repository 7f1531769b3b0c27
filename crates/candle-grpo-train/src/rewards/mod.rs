//! Reward functions: the trait, weighted sums, the functions of the configuration, and their
//! options.

mod answer;
mod column;
mod config;
mod ensemble;
mod exact;
mod format;
mod function;
mod json;
mod math;
mod number;
mod numeric;
mod pattern;
mod penalty;
mod program;
mod reward_model;
mod right_or_wrong;
mod rollouts;
mod weighted;

pub use answer::AnswerPlace;
pub use config::{EnsembleOptions, RegexOptions, RewardConfig, RewardKind, TagsOptions};
pub use ensemble::EnsembleReward;
pub use exact::ExactReward;
pub use format::{RegexReward, TagsReward};
pub use function::{RewardFunction, Sample, Scores};
pub use json::JsonReward;
pub use math::MathReward;
pub use numeric::NumericReward;
pub use penalty::{LengthReward, RepetitionReward};
pub use program::{ProgramConfig, ProgramReward};
pub use reward_model::{RewardModel, RewardModelConfig};
pub use weighted::WeightedRewards;

pub(crate) use rollouts::{RolloutScores, score_rollouts};
