//! Reward functions from `candle-grpo-rewards`, reward models, and rollout scores.

mod reward_model;
mod rollouts;

#[cfg(feature = "judge")]
pub use candle_grpo_rewards::JudgeReward;
#[cfg(feature = "math")]
pub use candle_grpo_rewards::MathReward;
pub use candle_grpo_rewards::{
    AnswerPlace, BudgetExhausted, EnsembleReward, ExactReward, F1Reward, JsonReward, JudgeConfig,
    JudgeScore, LengthReward, LengthScale, LengthScaledReward, MultipleChoiceReward, NumericReward,
    OnBudget, OnFailure, ProgramConfig, ProgramReward, RegexOptions, RegexReward, RepetitionReward,
    RewardFaults, RewardFunction, RewardRequests, Sample, Score, ScoreFailure, ScoreReader, Scores,
    TagsOptions, TagsReward, Votes, WeightedRewards,
};
#[cfg(feature = "code")]
pub use candle_grpo_rewards::{CodeConfig, CodeLimits, CodeReward};
#[cfg(feature = "instructions")]
pub use candle_grpo_rewards::{Instruction, InstructionsReward};
pub use reward_model::{RewardModel, RewardModelConfig};

pub(crate) use rollouts::score_rollouts;

/// One reward term in a configuration file, which may be a [`RewardModel`].
pub type RewardConfig = candle_grpo_rewards::RewardConfig<RewardModelConfig>;

/// The reward functions that a configuration can name.
pub type RewardKind = candle_grpo_rewards::RewardKind<RewardModelConfig>;

/// Options for [`LengthScaledReward`] with [`LengthScale::Cosine`].
pub type CosineOptions = candle_grpo_rewards::CosineOptions<RewardModelConfig>;

/// Options for [`LengthScaledReward`] with [`LengthScale::Relative`].
pub type RelativeLengthOptions = candle_grpo_rewards::RelativeLengthOptions<RewardModelConfig>;

/// Options for [`EnsembleReward`].
pub type EnsembleOptions = candle_grpo_rewards::EnsembleOptions<RewardModelConfig>;
