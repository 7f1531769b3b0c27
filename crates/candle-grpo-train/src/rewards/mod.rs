//! Reward functions: the trait, weighted sums, the functions of the configuration, and their
//! options.

mod answer;
mod code;
mod config;
mod ensemble;
mod exact;
mod f1;
mod format;
mod function;
mod instructions;
mod json;
mod judge;
mod math;
mod multiple_choice;
mod number;
mod numeric;
mod pattern;
mod penalty;
mod program;
mod requests;
mod reward_model;
mod right_or_wrong;
mod rollouts;
mod scaled_by_length;
mod score;
mod scores;
mod votes;
mod weighted;

pub use answer::AnswerPlace;
pub use code::{CodeConfig, CodeLimits, CodeReward};
pub use config::{
    CosineOptions, EnsembleOptions, RegexOptions, RelativeLengthOptions, RewardConfig, RewardKind,
    TagsOptions,
};
pub use ensemble::EnsembleReward;
pub use exact::ExactReward;
pub use f1::F1Reward;
pub use format::{RegexReward, TagsReward};
pub use function::{RewardFunction, Sample, Votes};
pub use instructions::{Instruction, InstructionsReward};
pub use json::JsonReward;
#[cfg(feature = "engines")]
pub use judge::JudgeReward;
pub use judge::{BudgetExhausted, JudgeConfig, JudgeScore, OnBudget, ScoreReader};
pub use math::MathReward;
pub use multiple_choice::MultipleChoiceReward;
pub use numeric::NumericReward;
pub use penalty::{LengthReward, RepetitionReward};
pub use program::{ProgramConfig, ProgramReward};
pub use requests::RewardRequests;
pub use reward_model::{RewardModel, RewardModelConfig};
pub use scaled_by_length::{LengthScale, LengthScaledReward};
pub use score::{OnFailure, Score, ScoreFailure};
pub use scores::{RewardFaults, Scores};
pub use weighted::WeightedRewards;

pub(crate) use rollouts::{RolloutScores, score_rollouts};
