//! The section `algorithm` of ROLL files and of earlier files, with the keys of ROLL's
//! documentation.

use candle_grpo_core::rewards::NormLevel;
use candle_grpo_core::{KlEstimator, Scale};
use candle_grpo_loss::{Aggregation, ImportanceLevel};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::preset::Preset;

/// The completion length if nothing sets it.
const RESPONSE_LENGTH: usize = 256;

/// The algorithm section: a preset, single keys laid over it, and over these any part of a
/// [`Recipe`](candle_grpo_loss::Recipe).
///
/// An absent key keeps the value of the preset, also with the `adv_estimator` of the preset.
/// Without a preset the algorithm is GRPO: rewards normalized in their group, clip 0.2,
/// `seq-mean-token-mean`, no KL. Without a preset, a key that normalizes or clips rewards starts
/// from ROLL's form of GRPO (`adv_estimator: grpo`).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmConfig {
    /// The published algorithm to start from.
    pub preset: Option<Preset>,
    /// Any part of the recipe, laid over the preset and the keys below.
    pub recipe: Option<Value>,

    /// Prompts per step. Default 32.
    pub rollout_batch_size: Option<usize>,
    /// Completions per prompt, which form a group. Default 8.
    pub num_return_sequences_in_group: Option<usize>,
    /// The maximum prompt length in tokens; longer prompts are dropped. Default 1024.
    pub prompt_length: Option<usize>,
    /// The maximum completion length in tokens. Default 256.
    pub response_length: Option<usize>,
    /// Passes over a step's completions. Default 1.
    pub ppo_epochs: Option<usize>,

    /// The advantage epsilon, added to every standard deviation that rewards or advantages are
    /// divided by.
    pub advantage_epsilon: Option<f64>,
    /// The divisor of the advantage: `group` (the group's standard deviation), `batch`,
    /// `group_mean` or `none`.
    pub advantage_scale: Option<Scale>,
    /// The KL coefficient. The preset decides between the loss and the rewards; if it has no KL,
    /// this adds k3 to the loss. 0 turns the KL off.
    pub kl_coef: Option<f64>,

    /// The advantage estimator: `grpo`, `reinforce` or `gae` (which trains a critic).
    pub adv_estimator: Option<AdvEstimator>,
    /// The discount per token. Default 1.
    pub gamma: Option<f64>,
    /// GAE's lambda, for `adv_estimator: gae`. Default 0.95.
    pub lambd: Option<f64>,
    /// Whitens per-token rewards before summing them.
    pub whiten_rewards: Option<bool>,
    /// Whitens advantages over all tokens in the step.
    pub whiten_advantages: Option<bool>,
    /// Clips advantages to this absolute value.
    pub advantage_clip: Option<f64>,
    /// The largest change to a critic value, for `adv_estimator: gae`.
    pub value_clip: Option<f64>,

    /// Normalizes rewards over these samples: `batch`, `group`, `running`, or null (`group` for
    /// `adv_estimator: grpo`).
    pub reward_norm: Option<NormLevel>,
    /// Only subtracts the mean when normalizing.
    pub reward_shift: Option<bool>,
    /// Only divides by the standard deviation when normalizing.
    pub reward_scale: Option<bool>,
    /// The level for the mean alone, instead of `reward_norm`.
    pub norm_mean_type: Option<NormLevel>,
    /// The level for the standard deviation alone, instead of `reward_norm`.
    pub norm_std_type: Option<NormLevel>,
    /// Clips normalized rewards to this absolute value; with `add_token_level_kl` also per-token
    /// rewards.
    pub reward_clip: Option<f64>,

    /// Subtracts a KL penalty from each per-token reward.
    pub add_token_level_kl: Option<bool>,
    /// That penalty's estimator: `kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3). Default `kl`.
    pub kl_penalty: Option<KlEstimator>,
    /// That penalty's coefficient; with `target_kl` the initial value. Default 0.2.
    pub init_kl_coef: Option<f64>,
    /// The adaptive controller's target KL. If absent, the coefficient is fixed.
    pub target_kl: Option<f64>,
    /// The adaptive controller's horizon in samples. Default 10000.
    pub kl_horizon: Option<f64>,

    /// The policy gradient: `ppo`, `vanilla`, `tis`, `topr`, `cispo` or `kimi15`. Default `ppo`.
    pub pg_variant: Option<PgVariant>,
    /// The ratio's clip width on both sides. Default 0.2.
    pub pg_clip: Option<f64>,
    /// Uses `pg_clip_low` and `pg_clip_high` instead of `pg_clip`. `pg_clip` is then an error,
    /// except with `dual_clip_loss`.
    pub use_pg_clip_range: Option<bool>,
    /// The lower clip width: the ratio is clipped at `1 - pg_clip_low`. Default 0.2.
    pub pg_clip_low: Option<f64>,
    /// The upper clip width: the ratio is clipped at `1 + pg_clip_high`. Default 0.2.
    pub pg_clip_high: Option<f64>,
    /// For negative advantages, bounds the loss at a ratio of `1 + 2 * pg_clip`.
    pub dual_clip_loss: Option<bool>,
    /// The smallest weight for `pg_variant: tis`. Default 0.
    pub tis_lower_bound: Option<f64>,
    /// The largest weight for `pg_variant: tis`. Default 1.
    pub tis_upper_bound: Option<f64>,
    /// The weight for correct completions with `pg_variant: topr`. Default 1.
    pub topr_positive_weight: Option<f64>,
    /// The weight for other completions with `pg_variant: topr`. Default 1.
    pub topr_negative_weight: Option<f64>,
    /// For `pg_variant: cispo`, the weight's lower bound is `1 - cispo_epsilon_low`. Default 0.1.
    pub cispo_epsilon_low: Option<f64>,
    /// For `pg_variant: cispo`, the weight's upper bound is `1 + cispo_epsilon_high`. Default 0.1.
    pub cispo_epsilon_high: Option<f64>,
    /// For `pg_variant: cispo`, masks the tokens that PPO would clip with these two widths.
    pub cispo_use_unified_mask: Option<bool>,
    /// For `pg_variant: kimi15`, the squared log-ratio's coefficient. Default 0.1.
    pub kimi15_tau: Option<f64>,
    /// The ratio's level: `token`, or `seq` (GSPO). Default `token`.
    pub importance_sampling: Option<ImportanceLevel>,

    /// Adds a KL to the reference policy to the loss.
    pub use_kl_loss: Option<bool>,
    /// That KL's coefficient. Default 0.001.
    pub kl_loss_coef: Option<f64>,
    /// The entropy bonus coefficient.
    pub entropy_loss_coef: Option<f64>,
    /// The coefficient for the policy and KL terms, but not the entropy. Default 1.
    pub rl_loss_coef: Option<f64>,
    /// The aggregation of per-token losses: `token-mean`, `seq-mean-token-sum`,
    /// `seq-mean-token-mean`, or `seq-mean-token-sum-norm` (which divides by
    /// `response_length`).
    pub loss_agg_mode: Option<Aggregation>,

    /// Masks completions that reach `response_length`.
    pub max_len_mask: Option<bool>,
    /// Masks the completions for prompts that are too hard or too easy.
    pub difficulty_mask: Option<bool>,
    /// The lower bound on a prompt's mean score, exclusive. Default 0.
    pub difficulty_low_threshold: Option<f64>,
    /// The upper bound on a prompt's mean score, exclusive. Default 1.
    pub difficulty_high_threshold: Option<f64>,
    /// Masks all completions except those with score 1, and short ones with score 0.
    pub error_max_len_clip: Option<bool>,
    /// The largest number of tokens that counts as short there. Default `response_length`.
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

/// ROLL's advantage estimators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvEstimator {
    /// Group advantages, summed from each token to the end.
    Grpo,
    /// Rewards summed from each token to the end.
    Reinforce,
    /// Generalized advantages, with a critic.
    Gae,
}

/// ROLL's policy gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// Kimi k1.5's policy gradient.
    Kimi15,
}
