//! Reward functions.

mod answer;
mod column;
mod config;
mod ensemble;
mod exact;
mod format;
pub(crate) mod function;
mod json;
mod number;
mod numeric;
mod penalty;
mod program;
mod right_or_wrong;

pub use answer::AnswerPlace;
pub use config::{EnsembleOptions, RegexOptions, RewardConfig, RewardKind, TagsOptions};
pub use ensemble::EnsembleReward;
pub use exact::ExactReward;
pub use format::{RegexReward, TagsReward};
pub use function::{RewardFunction, Sample, WeightedRewards};
pub use json::JsonReward;
pub use numeric::NumericReward;
pub use penalty::{LengthReward, RepetitionReward};
pub use program::{ProgramConfig, ProgramReward};
