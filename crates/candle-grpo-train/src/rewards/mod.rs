//! Reward functions of `candle-grpo-rewards`, reward models, and the scores of rollouts.

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

/// One term of the reward in a configuration file, which may be a [`RewardModel`].
pub type RewardConfig = candle_grpo_rewards::RewardConfig<RewardModelConfig>;

/// The reward functions that a configuration can name.
pub type RewardKind = candle_grpo_rewards::RewardKind<RewardModelConfig>;

/// The options of [`LengthScaledReward`] with [`LengthScale::Cosine`].
pub type CosineOptions = candle_grpo_rewards::CosineOptions<RewardModelConfig>;

/// The options of [`LengthScaledReward`] with [`LengthScale::Relative`].
pub type RelativeLengthOptions = candle_grpo_rewards::RelativeLengthOptions<RewardModelConfig>;

/// The options of [`EnsembleReward`].
pub type EnsembleOptions = candle_grpo_rewards::EnsembleOptions<RewardModelConfig>;
