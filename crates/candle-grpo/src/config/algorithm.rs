//! The section `algorithm` of ROLL files and of earlier files, with the keys of ROLL's
//! documentation.

use candle_grpo_core::rewards::NormLevel;
use candle_grpo_core::{KlEstimator, Scale};
use candle_grpo_loss::{Aggregation, ImportanceLevel};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::preset::Preset;

/// The length of completions if nothing sets it.
const RESPONSE_LENGTH: usize = 256;

/// The algorithm section: a preset, single keys laid over it, and over these any part of a
/// [`Recipe`](candle_grpo_loss::Recipe).
///
/// An absent key keeps the value of the preset, also with the `adv_estimator` of the preset.
/// Without a preset the algorithm is GRPO: rewards normalized in their group, clip 0.2,
/// `seq-mean-token-mean`, no KL. Without a preset, a key that normalizes or clips rewards starts
/// from ROLL's form of GRPO (`adv_estimator: grpo`).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmConfig {
    /// The published algorithm to start from.
    pub preset: Option<Preset>,
    /// Any part of the recipe, laid over the preset and the keys below.
    pub recipe: Option<Value>,

    /// Prompts in a step. Default 32.
    pub rollout_batch_size: Option<usize>,
    /// Completions of each prompt: its group. Default 8.
    pub num_return_sequences_in_group: Option<usize>,
    /// The longest prompt in tokens; longer prompts are left out. Default 1024.
    pub prompt_length: Option<usize>,
    /// The longest completion in tokens. Default 256.
    pub response_length: Option<usize>,
    /// Passes of a step over its completions. Default 1.
    pub ppo_epochs: Option<usize>,

    /// The advantage epsilon, added to every standard deviation that rewards or advantages are
    /// divided by.
    pub advantage_epsilon: Option<f64>,
    /// The divisor of the advantage: `group` (standard deviation of the group), `batch`,
    /// `group_mean` or `none`.
    pub advantage_scale: Option<Scale>,
    /// The KL coefficient, in the loss or in the rewards as the preset has it; in the loss if it
    /// has none, with k3. 0 turns the KL off.
    pub kl_coef: Option<f64>,

    /// The advantage estimator: `grpo`, `reinforce` or `gae` (which trains a critic).
    pub adv_estimator: Option<AdvEstimator>,
    /// The discount from one token to the next. Default 1.
    pub gamma: Option<f64>,
    /// GAE's lambda, for `adv_estimator: gae`. Default 0.95.
    pub lambd: Option<f64>,
    /// Whitens per-token rewards before they are summed.
    pub whiten_rewards: Option<bool>,
    /// Whitens advantages over all tokens of the step.
    pub whiten_advantages: Option<bool>,
    /// The absolute value that advantages are clipped to.
    pub advantage_clip: Option<f64>,
    /// The largest change of a value of the critic, for `adv_estimator: gae`.
    pub value_clip: Option<f64>,

    /// The samples over which rewards are normalized: `batch`, `group`, `running`, or null
    /// (`group` for `adv_estimator: grpo`).
    pub reward_norm: Option<NormLevel>,
    /// Lets normalization subtract the mean without a division.
    pub reward_shift: Option<bool>,
    /// Lets normalization divide by the standard deviation without a subtraction.
    pub reward_scale: Option<bool>,
    /// The level of the mean alone, in place of `reward_norm`.
    pub norm_mean_type: Option<NormLevel>,
    /// The level of the standard deviation alone, in place of `reward_norm`.
    pub norm_std_type: Option<NormLevel>,
    /// The absolute value that normalized rewards are clipped to; with `add_token_level_kl`
    /// per-token rewards too.
    pub reward_clip: Option<f64>,

    /// Subtracts a KL penalty from each per-token reward.
    pub add_token_level_kl: Option<bool>,
    /// The estimator of that penalty: `kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3). Default
    /// `kl`.
    pub kl_penalty: Option<KlEstimator>,
    /// The coefficient of that penalty; with `target_kl` its initial value. Default 0.2.
    pub init_kl_coef: Option<f64>,
    /// Target KL of the adaptive controller. If absent, the coefficient is fixed.
    pub target_kl: Option<f64>,
    /// The horizon of the adaptive controller in samples. Default 10000.
    pub kl_horizon: Option<f64>,

    /// The policy gradient: `ppo`, `vanilla`, `tis`, `topr`, `cispo` or `kimi15`. Default `ppo`.
    pub pg_variant: Option<PgVariant>,
    /// The clip width of the ratio on both sides. Default 0.2.
    pub pg_clip: Option<f64>,
    /// Replaces `pg_clip` by `pg_clip_low` and `pg_clip_high`. `pg_clip` is then an error, except
    /// with `dual_clip_loss`.
    pub use_pg_clip_range: Option<bool>,
    /// The lower clip width: the ratio is clipped at `1 - pg_clip_low`. Default 0.2.
    pub pg_clip_low: Option<f64>,
    /// The upper clip width: the ratio is clipped at `1 + pg_clip_high`. Default 0.2.
    pub pg_clip_high: Option<f64>,
    /// Bounds the loss of a negative advantage at a ratio of `1 + 2 * pg_clip`.
    pub dual_clip_loss: Option<bool>,
    /// The smallest weight of `pg_variant: tis`. Default 0.
    pub tis_lower_bound: Option<f64>,
    /// The largest weight of `pg_variant: tis`. Default 1.
    pub tis_upper_bound: Option<f64>,
    /// The weight of correct completions with `pg_variant: topr`. Default 1.
    pub topr_positive_weight: Option<f64>,
    /// The weight of other completions with `pg_variant: topr`. Default 1.
    pub topr_negative_weight: Option<f64>,
    /// The lower bound of the weight of `pg_variant: cispo` is `1 - cispo_epsilon_low`. Default
    /// 0.1.
    pub cispo_epsilon_low: Option<f64>,
    /// The upper bound of the weight of `pg_variant: cispo` is `1 + cispo_epsilon_high`. Default
    /// 0.1.
    pub cispo_epsilon_high: Option<f64>,
    /// Masks the tokens that PPO would clip with these two widths, for `pg_variant: cispo`.
    pub cispo_use_unified_mask: Option<bool>,
    /// The coefficient of the squared log-ratio of `pg_variant: kimi15`. Default 0.1.
    pub kimi15_tau: Option<f64>,
    /// The level of the ratio: `token`, or `seq` (GSPO). Default `token`.
    pub importance_sampling: Option<ImportanceLevel>,

    /// Adds a KL to the reference policy to the loss.
    pub use_kl_loss: Option<bool>,
    /// The coefficient of that KL. Default 0.001.
    pub kl_loss_coef: Option<f64>,
    /// Entropy bonus coefficient.
    pub entropy_loss_coef: Option<f64>,
    /// The coefficient of the policy and KL terms, but not of the entropy. Default 1.
    pub rl_loss_coef: Option<f64>,
    /// The aggregation of per-token losses: `token-mean`, `seq-mean-token-sum`,
    /// `seq-mean-token-mean`, or `seq-mean-token-sum-norm` (which divides by
    /// `response_length`).
    pub loss_agg_mode: Option<Aggregation>,

    /// Masks completions as long as `response_length`.
    pub max_len_mask: Option<bool>,
    /// Masks completions of prompts that are too hard or too easy.
    pub difficulty_mask: Option<bool>,
    /// The lower bound of the mean score of a prompt, exclusive. Default 0.
    pub difficulty_low_threshold: Option<f64>,
    /// The upper bound of the mean score of a prompt, exclusive. Default 1.
    pub difficulty_high_threshold: Option<f64>,
    /// Masks all completions but those with score 1, and those with score 0 and few tokens.
    pub error_max_len_clip: Option<bool>,
    /// The largest number of tokens that counts as few there. Default `response_length`.
    pub error_max_len_threshold: Option<usize>,
}

impl AlgorithmConfig {
    /// Gives `loss_agg_mode: seq-mean-token-sum-norm` in a section its length, which is
    /// `response_length`.
    pub(super) fn expand(section: &mut Value) {
        const NORM: &str = "seq-mean-token-sum-norm";
        if section
            .get("loss_agg_mode")
            .is_some_and(|mode| mode == NORM)
        {
            let length = section.get("response_length").and_then(Value::as_f64);
            let length = length.unwrap_or(RESPONSE_LENGTH as f64);
            section["loss_agg_mode"] = json!({NORM: {"length": length}});
        }
    }
}

/// The advantage estimators of ROLL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvEstimator {
    /// Advantages of the group, summed from each token to the end.
    Grpo,
    /// Rewards summed from each token to the end.
    Reinforce,
    /// Generalized advantages, with a critic.
    Gae,
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
