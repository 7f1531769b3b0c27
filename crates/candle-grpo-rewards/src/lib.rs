//! Reward functions for reinforcement learning and evaluation, without a trainer.
//!
//! # Start here
//!
//! - To score completions in your own code, implement [`RewardFunction`] or pass a closure. It
//!   receives [`Sample`]s and returns a [`Score`] for each.
//! - To check answers, choose a built-in function: [`MathReward`] for mathematics, [`CodeReward`]
//!   for programs, [`ExactReward`] or [`NumericReward`] for short answers.
//! - To add several functions, use [`WeightedRewards`].
//! - To build functions from a configuration file, use [`RewardConfig`].
//! - To call a script in any language, use [`ProgramReward`]. The module [`program`] runs the
//!   processes.
//!
//! A score is only as good as its check: read some high-scoring completions before you trust a
//! reward.

mod answer;
#[cfg(feature = "code")]
mod code;
mod config;
mod ensemble;
mod exact;
mod f1;
mod finish_reason;
mod format;
mod function;
#[cfg(feature = "instructions")]
mod instructions;
#[cfg(feature = "code")]
mod isolation;
mod json;
mod judge;
#[cfg(feature = "math")]
pub mod math;
mod multiple_choice;
mod network;
mod number;
mod numeric;
mod options;
mod pattern;
mod penalty;
mod processes;
pub mod program;
mod program_reward;
mod requests;
mod reward_model_options;
mod right_or_wrong;
mod scaled_by_length;
mod score;
mod scores;
mod votes;
mod weighted;

pub use answer::AnswerPlace;
pub use candle_grpo_base::{Interrupted, Progress};
#[cfg(feature = "code")]
pub use code::{CodeConfig, CodeReward};
pub use config::{CosineOptions, EnsembleOptions, RelativeLengthOptions, RewardConfig, RewardKind};
pub use ensemble::EnsembleReward;
pub use exact::ExactReward;
pub use f1::F1Reward;
pub use finish_reason::FinishReason;
pub use format::{RegexOptions, RegexReward, TagsOptions, TagsReward};
pub use function::{RewardFunction, Sample, Votes};
#[cfg(feature = "instructions")]
pub use instructions::{Instruction, InstructionsReward};
#[cfg(feature = "code")]
pub use isolation::CodeLimits;
pub use json::JsonReward;
#[cfg(feature = "judge")]
pub use judge::JudgeReward;
pub use judge::{BudgetExhausted, JudgeConfig, JudgeScore, OnBudget, ScoreReader};
#[cfg(feature = "math")]
pub use math::MathReward;
pub use multiple_choice::MultipleChoiceReward;
pub use numeric::NumericReward;
pub use pattern::compile as compile_pattern;
pub use penalty::{LengthReward, RepetitionReward};
pub use program_reward::{ProgramConfig, ProgramReward};
pub use requests::RewardRequests;
pub use reward_model_options::{NoRewardModel, RewardModelOptions};
pub use scaled_by_length::{LengthScale, LengthScaledReward};
pub use score::{OnFailure, Score, ScoreFailure};
pub use scores::{RewardFaults, Scores};
pub use weighted::{WeightedRewards, total};

/// Default factor, for serde.
fn one() -> f64 {
    1.
}

/// Runs the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
