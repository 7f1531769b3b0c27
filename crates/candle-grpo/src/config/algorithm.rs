//! The algorithm section, in the words of ROLL's documentation.

use candle_grpo_core::NormLevel;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::preset::Preset;

/// The algorithm section: a preset, single keys in the words of ROLL's documentation laid over it, and over these any part of a
/// [`Recipe`](candle_grpo_loss::Recipe).
///
/// An absent key leaves what the preset says. Without a preset it is GRPO as ROLL has it where nothing else is said: rewards
/// normalised in their group, clip 0.2, `seq-mean-token-mean`, no KL.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmConfig {
    /// A published algorithm to start from.
    pub preset: Option<Preset>,
    /// Any part of the recipe, laid over the preset and the keys below.
    pub recipe: Option<Value>,

    /// Prompts in a step. Default 32.
    pub rollout_batch_size: Option<usize>,
    /// Completions of each prompt: its group. Default 8.
    pub num_return_sequences_in_group: Option<usize>,
    /// Prompts with more tokens than this are left out. Default 1024.
    pub prompt_length: Option<usize>,
    /// The greatest length of a completion in tokens. Default 256.
    pub response_length: Option<usize>,
    /// How often a step goes through its completions. Default 1.
    pub ppo_epochs: Option<usize>,

    /// How rewards become advantages: `grpo`, `reinforce` or `gae` (which trains a critic).
    pub adv_estimator: Option<AdvEstimator>,
    /// The discount from one token to the next. Default 1.
    pub gamma: Option<f64>,
    /// GAE's lambda, for `adv_estimator: gae`. Default 0.95.
    pub lambd: Option<f64>,
    /// Whether the rewards of tokens are whitened before they are summed.
    pub whiten_rewards: Option<bool>,
    /// Whether advantages are whitened over all tokens of the step.
    pub whiten_advantages: Option<bool>,
    /// Advantages are clipped to plus and minus this.
    pub advantage_clip: Option<f64>,
    /// How far a value of the critic may move from the old one, for `adv_estimator: gae`.
    pub value_clip: Option<f64>,

    /// Over which samples rewards are normalised: `batch`, `group`, `running`, or null (`group` for `adv_estimator: grpo`).
    pub reward_norm: Option<NormLevel>,
    /// Whether normalising rewards only subtracts the mean.
    pub reward_shift: Option<bool>,
    /// Whether normalising rewards only divides by the standard deviation.
    pub reward_scale: Option<bool>,
    /// The level of the mean alone, in place of `reward_norm`.
    pub norm_mean_type: Option<NormLevel>,
    /// The level of the standard deviation alone, in place of `reward_norm`.
    pub norm_std_type: Option<NormLevel>,
    /// Rewards are clipped to plus and minus this after they are normalised; with `add_token_level_kl` those of tokens too.
    pub reward_clip: Option<f64>,

    /// Whether a KL penalty comes off the reward of each token.
    pub add_token_level_kl: Option<bool>,
    /// Which estimate that penalty is: `kl`, `abs` or `mse`. Default `kl`.
    pub kl_penalty: Option<KlPenaltyName>,
    /// The coefficient of that penalty, at the start if it is steered. Default 0.2.
    pub init_kl_coef: Option<f64>,
    /// The KL that the coefficient is steered to; absent: it stays.
    pub target_kl: Option<f64>,
    /// How many samples it takes to steer it. Default 10000.
    pub kl_horizon: Option<f64>,

    /// Which policy gradient: `ppo`, `vanilla`, `tis`, `topr`, `cispo` or `kimi15`. Default `ppo`.
    pub pg_variant: Option<PgVariant>,
    /// How far the ratio may go from 1. Default 0.2.
    pub pg_clip: Option<f64>,
    /// Whether `pg_clip_low` and `pg_clip_high` take the place of `pg_clip`.
    pub use_pg_clip_range: Option<bool>,
    /// How far the ratio may go below 1. Default 0.2.
    pub pg_clip_low: Option<f64>,
    /// How far the ratio may go above 1. Default 0.2.
    pub pg_clip_high: Option<f64>,
    /// Whether the loss of a negative advantage is bounded at a ratio of `1 + 2 * pg_clip`.
    pub dual_clip_loss: Option<bool>,
    /// The smallest weight of `pg_variant: tis`. Default 0.
    pub tis_lower_bound: Option<f64>,
    /// The largest weight of `pg_variant: tis`. Default 1.
    pub tis_upper_bound: Option<f64>,
    /// The weight of right completions with `pg_variant: topr`. Default 1.
    pub topr_positive_weight: Option<f64>,
    /// The weight of the others with `pg_variant: topr`. Default 1.
    pub topr_negative_weight: Option<f64>,
    /// How far below 1 the weight of `pg_variant: cispo` may go. Default 0.1.
    pub cispo_epsilon_low: Option<f64>,
    /// How far above 1 the weight of `pg_variant: cispo` may go. Default 0.1.
    pub cispo_epsilon_high: Option<f64>,
    /// Whether `pg_variant: cispo` leaves out the tokens that PPO would clip.
    pub cispo_use_unified_mask: Option<bool>,
    /// The weight of the squared log-ratio of `pg_variant: kimi15`. Default 0.1.
    pub kimi15_tau: Option<f64>,
    /// The level of the ratio: `token`, or `seq` (GSPO). Default `token`.
    pub importance_sampling: Option<ImportanceSampling>,

    /// Whether the loss has a KL to the reference policy.
    pub use_kl_loss: Option<bool>,
    /// What multiplies it. Default 0.001.
    pub kl_loss_coef: Option<f64>,
    /// What multiplies the entropy that is taken off the loss.
    pub entropy_loss_coef: Option<f64>,
    /// What multiplies the policy and KL terms, but not the entropy. Default 1.
    pub rl_loss_coef: Option<f64>,
    /// How the losses of tokens become one number: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean` or
    /// `seq-mean-token-sum-norm` (which divides by `response_length`).
    pub loss_agg_mode: Option<LossAggMode>,

    /// Whether completions as long as `response_length` are left out of the loss.
    pub max_len_mask: Option<bool>,
    /// Whether completions of prompts that are too hard or too easy are left out of the loss.
    pub difficulty_mask: Option<bool>,
    /// The mean score of a prompt must be above this. Default 0.
    pub difficulty_low_threshold: Option<f64>,
    /// The mean score of a prompt must be below this. Default 1.
    pub difficulty_high_threshold: Option<f64>,
    /// Whether only completions with the score 1, or 0 and few tokens, stay in the loss.
    pub error_max_len_clip: Option<bool>,
    /// How many tokens are few there. Default `response_length`.
    pub error_max_len_threshold: Option<usize>,
}

/// The estimators of ROLL that are known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvEstimator {
    /// Rewards normalised in their group, summed from each token to the end.
    Grpo,
    /// Rewards summed from each token to the end.
    Reinforce,
    /// Generalised advantages, with a critic.
    Gae,
}

/// The estimates of ROLL's KL penalty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPenaltyName {
    /// The log-ratio.
    Kl,
    /// Its absolute value.
    Abs,
    /// Half its square.
    Mse,
}

/// The policy gradients of ROLL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PgVariant {
    /// The clipped surrogate.
    Ppo,
    /// The plain policy gradient.
    Vanilla,
    /// Truncated importance sampling.
    Tis,
    /// TOPR.
    Topr,
    /// CISPO.
    Cispo,
    /// The policy gradient of Kimi k1.5.
    Kimi15,
}

/// The levels of ROLL's ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSampling {
    /// Each token.
    Token,
    /// The sequence.
    Seq,
}

/// The aggregations of ROLL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggMode {
    /// Each token counts the same.
    TokenMean,
    /// Sums over sequences, divided by their number.
    SeqMeanTokenSum,
    /// Each sequence counts the same.
    SeqMeanTokenMean,
    /// Sums over sequences, divided by their number and `response_length`.
    SeqMeanTokenSumNorm,
}
