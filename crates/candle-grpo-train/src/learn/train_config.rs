//! The settings of a training run.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_collective::Collective;
use candle_grpo_core::AdvantageEstimator as _;
use candle_grpo_core::Invalid;
use candle_grpo_core::advantage::RoleBaselines;
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::kl::KlController;
use candle_grpo_core::selection::{SampleFilter, ScoreResampling};
use candle_grpo_core::validate::{self as check, Name};
use candle_grpo_loss::surrogate::LossLevel;
use candle_grpo_loss::{AdaptiveEntropy, EntropyTokens, Recipe, TokenLoss};
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{
    ActivationCheckpointing, AdamWConfig, BaseWeights, ComputeDType, LoraConfig, WeightDivision,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::actor::{
    divides_weights, division, ensure_dense, ensure_dtypes, ensure_memory, ensure_offloading,
    in_bf16, stored_form,
};
use super::micro_batches::{MicroBatchSize, MicroBatchTokens};
use super::needs::{Needs, Source, ensure_consistent, keeps_components};
use super::{
    DemonstrationConfig, LearningRateSchedule, ReferenceRefresh, TeacherSamplesConfig, TokenWeight,
    TurnAdvantage,
};
use crate::data::rows::number;
use crate::rollout::{Engine, RolloutConfig, WeightSync};
use crate::{ActorConfig, CriticConfig, SamplingConfig};
use candle_grpo_base::within;

/// The source of the old log-probs, the denominator of the ratio of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OldLogProbs {
    /// [`Self::Current`] in steps with a single update, and otherwise [`Self::Recompute`]. A
    /// rollout correction, and an advantage that needs the old log-probs, also recompute them.
    #[default]
    Auto,
    /// A forward pass of the policy before the first update of the step. Correct for any generator.
    Recompute,
    /// The log-probs that the generator recorded, without a forward pass. Those of the local
    /// generator differ by rounding only.
    Sampler,
    /// The policy itself, without a forward pass. Requires steps with a single update.
    Current,
}

/// The default of [`TrainConfig::micro_batch_size`].
pub(super) const MICRO_BATCH_SIZE: usize = 32;

/// The settings of a training run.
///
/// ```
/// use candle_grpo_loss::Recipe;
/// use candle_grpo_train::TrainConfig;
///
/// let config = TrainConfig {
///     prompts_per_step: 16,
///     recipe: Recipe::dapo(1024, 128),
///     ..TrainConfig::default()
/// };
/// config.validate()?;
///
/// let config = TrainConfig { prompts_per_step: 0, ..config };
/// let error = config.validate().unwrap_err();
/// assert_eq!(error.to_string(), "prompts_per_step: 0, must be at least 1");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Number of prompts in a step.
    ///
    /// A prompt may occur more than once in a step at the end of the data set, or if the data set
    /// is smaller. Each occurrence has its own completions and group.
    pub prompts_per_step: usize,
    /// Number of completions of each prompt: the group size.
    pub num_generations: usize,
    /// The sampling of completions. Its seed also determines the order of the prompts.
    pub sampling: SamplingConfig,
    /// The engine that draws completions, and how far ahead it draws.
    pub rollout: RolloutConfig,
    /// The algorithm: reward shaping, group filter, advantages and loss. With a KL term the
    /// initial policy is the reference.
    pub recipe: Recipe,
    /// Maximum number of sampling rounds in a step that replaces the groups dropped by
    /// [`Recipe::group_filter`]. The step then trains on the groups that it has. With 1,
    /// dropped groups are not replaced.
    pub max_sampling_batches: usize,
    /// Filters of completions. Dropped completions count in the statistics of their groups, unless
    /// the advantage excludes them, and are masked in the loss and its denominators.
    pub sample_filters: Vec<SampleFilter>,
    /// Share of the tokens that train the policy: those of highest entropy under the policy before
    /// the step (<https://arxiv.org/abs/2506.01939>; TRL's `top_entropy_quantile`). Absent: all tokens.
    pub top_entropy: Option<f64>,
    /// Column with a weight, a positive number, for the policy term of a row's completions.
    /// Weights are divided by their mean over the step. Absent: all rows weigh the same.
    pub sample_weight_column: Option<String>,
    /// Weights of response tokens by their text, each with a `pattern` and a `weight`, in every
    /// term of `recipe.policy_loss` except the entropy and the observations (ms-swift's
    /// `loss_scale`). The last pattern that matches a token counts. Empty: all tokens weigh
    /// the same.
    pub token_weights: Vec<TokenWeight>,
    /// Resampling of the completions by score, with replacement, after the advantages are computed
    /// (PF-PPO, <https://arxiv.org/abs/2409.06957>).
    pub resampling: Option<ScoreResampling>,
    /// Advantages of the turns of trajectories, in place of `recipe.advantage`: `gigpo` or
    /// `step_returns`, each with its options. Needs an environment. Absent: the advantage of the
    /// recipe, which is that of the whole trajectory.
    pub turn_advantage: Option<TurnAdvantage>,
    /// Advantages that compare a reward with the moving average of its role's rewards, in place of
    /// `recipe.advantage` (SPIRAL, <https://arxiv.org/abs/2506.24119>; prime-rl's `rae`). Agents name a
    /// role as the model, and environments at the start. Trajectories without roles have one
    /// average.
    pub role_baselines: Option<RoleBaselines>,
    /// Demonstrations that the policy learns from in addition to its rewards (CHORD,
    /// <https://arxiv.org/abs/2508.11408>), with the options `batch_size`, `coef`, `uncertainty_weight`,
    /// `micro_batch_tokens` and `teacher_samples`. Absent: none.
    pub demonstrations: Option<DemonstrationConfig>,
    /// Low-rank adapters that train in place of the parameters. The reference is then the policy
    /// without them. Absent: all parameters train.
    pub adapters: Option<LoraConfig>,
    /// The form in memory of the linear maps under adapters: `dense` in the dtype of the
    /// computation, or blocks of quantized numbers (QLoRA, <https://arxiv.org/abs/2305.14314>):
    /// those that a GGUF file has (`stored`), or `q4_0`, `q5_0`, `q8_0`, `q4_k`, `q5_k` or `q6_k`.
    /// Products are of the dequantized numbers.
    pub base_weights: BaseWeights,
    /// Updates of the reference from the policy. Absent: the reference is frozen.
    pub reference_refresh: Option<ReferenceRefresh>,
    /// Controller of the coefficient of the KL penalty in token rewards, in place of the fixed
    /// coefficient in the recipe.
    pub reward_kl: Option<KlController>,
    /// Controller of the entropy bonus coefficient, in place of the fixed coefficient in the
    /// recipe.
    pub adaptive_entropy: Option<AdaptiveEntropy>,
    /// The critic, which GAE requires.
    pub critic: Option<CriticConfig>,
    /// Source of the old log-probs.
    pub old_log_probs: OldLogProbs,
    /// Number of passes over the completions of a step.
    pub epochs: usize,
    /// Number of completions in an optimizer step. Absent: all of the step.
    pub mini_batch_size: Option<usize>,
    /// Number of completions in a backward pass. It bounds memory and does not change the update.
    pub micro_batch_size: usize,
    /// Number of tokens in a backward pass, in place of `micro_batch_size`, which then must keep
    /// its default: those of the prompts, each of which counts once in a pass, and of the
    /// completions. With `router_replay` a prompt counts again from the first token with other
    /// experts. Passes with the longest completions come first. A longer completion is a pass
    /// of its own. `auto`: as many as fit into memory, chosen when the run starts; a resumed run
    /// keeps the number. Absent: no bound.
    pub micro_batch_tokens: Option<MicroBatchTokens>,
    /// Keep only the input of a layer for the backward pass and recompute the rest: `true` for all
    /// layers, `false` for none, or the number of layers. The update has the same bits. With all,
    /// memory hardly grows with the number of layers, and a step takes a third longer. With fewer,
    /// it takes less time and more memory.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Move the kept inputs of these layers from the GPU to page-locked main memory until the
    /// backward pass. The copies run beside the computation, and the update has the same bits. For
    /// long sequences. On the CPU, it changes nothing.
    pub activation_offloading: bool,
    /// The dtype in which policy and reference compute. Weights that train are f32 as well; those
    /// under adapters are in this dtype alone.
    pub compute_dtype: ComputeDType,
    /// Coefficient of the load-balancing loss of a model with experts, which is added to the loss
    /// of the policy (Switch Transformer, <https://arxiv.org/abs/2101.03961>; `router_aux_loss_coef` of
    /// transformers). It is `E * sum_e f_e * P_e` over the tokens of a micro-batch and all
    /// layers together: the number of choices of expert e per token, and its mean probability.
    /// A micro-batch has the weight of its share of the tokens. Prompts count once in each
    /// completion, and completions that do not train do not count.
    pub router_aux_loss_coef: f64,
    /// Replay the experts of the sampler in all passes of the policy (rollout routing replay, R3,
    /// <https://arxiv.org/abs/2510.11370>): the sampler records which experts each token had, and the
    /// routers then compute only their gates. Rounding or an update may otherwise change the
    /// experts of a token, and with them its ratio. Needs the engine `local`. The reference
    /// chooses its own experts.
    pub router_replay: bool,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The tensors that the ranks of a data-parallel run divide: `none`, `optimizer` (the state of
    /// the optimizer; ZeRO, stage 1, <https://arxiv.org/abs/1910.02054>), `resident` (the state, the
    /// gradients, and in half precision the f32 weights), or `full` (also all other weights, which
    /// the ranks gather block by block, and together to sample). Checkpoints do not depend on it.
    pub sharding: Sharding,
    /// The number of ranks that share each pass over the policy, a reference and the critic
    /// (context parallelism): they divide the tokens of every sequence, and with them the
    /// activations. Above 1, it is for sequences that are too long for one rank. The number of
    /// all ranks must be a multiple of it.
    pub sequence_ranks: usize,
    /// The learning-rate schedule.
    pub schedule: LearningRateSchedule,
    /// Maximum global norm of the gradients.
    pub max_grad_norm: f64,
}

impl Default for TrainConfig {
    /// GRPO: [`Recipe::default`].
    fn default() -> Self {
        Self {
            prompts_per_step: 32,
            num_generations: 8,
            sampling: SamplingConfig::default(),
            rollout: RolloutConfig::default(),
            recipe: Recipe::default(),
            max_sampling_batches: 10,
            sample_filters: Vec::new(),
            top_entropy: None,
            sample_weight_column: None,
            token_weights: Vec::new(),
            resampling: None,
            turn_advantage: None,
            role_baselines: None,
            demonstrations: None,
            adapters: None,
            base_weights: BaseWeights::default(),
            reference_refresh: None,
            reward_kl: None,
            adaptive_entropy: None,
            critic: None,
            old_log_probs: OldLogProbs::default(),
            epochs: 1,
            mini_batch_size: None,
            micro_batch_size: MICRO_BATCH_SIZE,
            micro_batch_tokens: None,
            activation_checkpointing: ActivationCheckpointing::default(),
            activation_offloading: false,
            compute_dtype: ComputeDType::F32,
            router_aux_loss_coef: 0.,
            router_replay: false,
            optimizer: AdamWConfig {
                learning_rate: 1e-6,
                ..AdamWConfig::default()
            },
            sharding: Sharding::None,
            sequence_ranks: 1,
            schedule: LearningRateSchedule::default(),
            max_grad_norm: 1.,
        }
    }
}

impl TrainConfig {
    /// Checks everything that does not depend on the model. [`Trainer::new`](crate::Trainer::new)
    /// checks it, too.
    ///
    /// # Errors
    ///
    /// Returns an error with an [`Invalid`](candle_grpo_core::Invalid) in it that names the field
    /// that is not valid or contradicts another.
    pub fn validate(&self) -> Result<()> {
        self.validate_with(Needs::new(self, None))
    }

    /// [`Self::validate`] for an algorithm with these needs.
    pub(super) fn validate_with(&self, needs: Needs) -> Result<()> {
        for (name, value) in [
            ("prompts_per_step", self.prompts_per_step),
            ("num_generations", self.num_generations),
            ("max_sampling_batches", self.max_sampling_batches),
            ("epochs", self.epochs),
            ("mini_batch_size", self.mini_batch_size.unwrap_or(1)),
            ("micro_batch_size", self.micro_batch_size),
            ("sequence_ranks", self.sequence_ranks),
        ] {
            check::at_least_one(name, value)?;
        }
        if let Some(MicroBatchTokens::Tokens(tokens)) = self.micro_batch_tokens {
            check::at_least_one("micro_batch_tokens", tokens)?;
        }
        check::check(
            self.micro_batch_tokens.is_none() || self.micro_batch_size == MICRO_BATCH_SIZE,
            "micro_batch_size",
            self.micro_batch_size,
            "be absent with micro_batch_tokens, which takes its place",
        )?;
        check::positive("max_grad_norm", self.max_grad_norm)?;
        check::non_negative("router_aux_loss_coef", self.router_aux_loss_coef)?;
        check::check(
            !self.sampling.greedy,
            "sampling.greedy",
            true,
            "be false in training: all completions of a group would be the same",
        )?;
        check::check(
            self.base_weights == BaseWeights::Dense || self.adapters.is_some(),
            "base_weights",
            "quantized",
            "be dense unless adapters train",
        )?;
        let has_baselines = self.role_baselines.is_some();
        ensure_consistent(&self.recipe, self.num_generations, has_baselines)?;
        check::check(
            self.recipe.policy_loss.entropy_tokens == EntropyTokens::All
                || self.top_entropy.is_some(),
            "recipe.policy_loss.entropy_tokens",
            "top_entropy",
            "be all unless top_entropy is set",
        )?;
        if let Some(share) = self.top_entropy {
            check::share("top_entropy", share)?;
        }
        if let Some(ScoreResampling::Power(power)) = self.resampling {
            check::non_negative("resampling.power", power)?;
        }
        for (i, filter) in self.sample_filters.iter().enumerate() {
            if let SampleFilter::Difficulty { low, high } = *filter {
                check::range(&format!("sample_filters[{i}]"), [low, high])?;
            }
        }
        for (i, weight) in self.token_weights.iter().enumerate() {
            let name = format!("token_weights[{i}]");
            weight.validate().map_err(|error| within(&name, error))?;
        }
        if let Some(demonstrations) = &self.demonstrations {
            demonstrations
                .validate()
                .map_err(|error| within("demonstrations", error))?;
        }
        self.optimizer
            .validate()
            .map_err(|error| within("optimizer", error.into()))?;
        ensure_dtypes(&self.optimizer, self.compute_dtype, self.adapters.is_some())?;
        ensure_memory(&self.optimizer, self.adapters.is_some(), self.sharding)?;
        ensure_offloading(self.activation_checkpointing, self.activation_offloading)?;
        self.validate_sharding()?;
        self.validate_old_log_probs()?;
        self.validate_controllers()?;
        self.validate_reference(needs)?;
        self.validate_critic(needs)?;
        self.validate_turn_advantage()?;
        self.validate_role_baselines()?;
        self.validate_groups()?;
        self.schedule
            .validate()
            .map_err(|error| within("schedule", error))?;
        self.validate_rollout()?;
        self.sampling
            .validate()
            .map_err(|error| within("sampling", error))
    }

    /// Returns the weight of a row with these columns, before it is divided by the mean.
    ///
    /// # Errors
    ///
    /// If the row has no positive number in [`Self::sample_weight_column`].
    pub fn sample_weight(&self, columns: &Value) -> Result<f64> {
        let Some(column) = &self.sample_weight_column else {
            return Ok(1.);
        };
        let found = &columns[column];
        let weight = number(found).filter(|weight| weight.is_finite() && *weight > 0.);
        weight.with_context(|| {
            format!("column {column:?}: {found}, must be a positive number (sample_weight_column)")
        })
    }

    /// Returns the dtype in which the policy in this process draws.
    pub fn rollout_dtype(&self) -> ComputeDType {
        self.rollout.dtype.unwrap_or(self.compute_dtype)
    }

    /// The dtype in which the policy in this process draws, if it trains in another.
    pub(crate) fn own_rollout_dtype(&self) -> Option<ComputeDType> {
        Some(self.rollout_dtype()).filter(|&dtype| dtype != self.compute_dtype)
    }

    fn validate_rollout(&self) -> Result<()> {
        self.rollout
            .validate()
            .map_err(|error| within("rollout", error))?;
        check::check(
            self.rollout.weight_sync != WeightSync::Adapter || self.adapters.is_some(),
            "rollout.weight_sync",
            "adapter",
            "be auto or disk unless adapters train",
        )?;
        check::check(
            !self.rollout.merge_adapters || self.adapters.is_some(),
            "rollout.merge_adapters",
            true,
            "be false unless adapters train",
        )?;
        if let Some(dtype) = self.own_rollout_dtype() {
            let must = "be absent or compute_dtype, unless that is f32";
            let trained = self.compute_dtype == ComputeDType::F32;
            check::check(trained, "rollout.dtype", check::Name(&dtype), must)?;
        }
        check::check(
            self.sampling.max_cache_mib.is_none() || self.rollout.engine.is_local(),
            "sampling.max_cache_mib",
            "given",
            "be absent unless rollout.engine is local: a server has its own cache",
        )?;
        self.rollout
            .engine
            .validate_sampling(&self.sampling)
            .map_err(|error| within("sampling", error))?;
        if self.sampling.structured_outputs.is_some() {
            let must = "be false with sampling.structured_outputs, whose form a server starts again when it continues a completion";
            check::check(!self.rollout.partial, "rollout.partial", true, must)?;
            let in_flight = self.rollout.in_flight_updates;
            check::check(!in_flight, "rollout.in_flight_updates", true, must)?;
            let reads = self
                .recipe
                .policy_loss
                .needs()
                .contains(Input::RolloutLogProbs);
            check::check(
                !reads,
                "sampling.structured_outputs",
                "given",
                "be absent with recipe.policy_loss.off_policy_threshold and with a distillation whose student is rollout: they compare log-probs of all tokens with those of the tokens that the form allows",
            )?;
        }
        check::check(
            !self.router_replay || self.rollout.engine == Engine::Local,
            "router_replay",
            true,
            "be false unless rollout.engine is local, which records experts",
        )?;
        check::check(
            self.rollout.max_staleness == 0 || self.recipe.policy_loss.rollout_correction.is_some(),
            "rollout.max_staleness",
            self.rollout.max_staleness,
            "be 0 without recipe.policy_loss.rollout_correction, which corrects for older weights",
        )?;
        let keeps_adapters = self.adapters.is_some()
            && self.rollout.weight_sync == WeightSync::Auto
            && !self.rollout.sleep_mode;
        check::check(
            !self.rollout.check_weights || !keeps_adapters,
            "rollout.check_weights",
            true,
            "be false with adapters, unless rollout.weight_sync is disk, nccl or ipc, or rollout.sleep_mode is true",
        )?;
        check::check(
            !self.rollout.partial || self.recipe.policy_loss.rollout_correction.is_some(),
            "rollout.partial",
            true,
            "be false without recipe.policy_loss.rollout_correction, which corrects for older weights",
        )?;
        let coef = self.recipe.policy_loss.observation_coef;
        check::check(
            coef == 0. || self.rollout.engine != Engine::Openai,
            "recipe.policy_loss.observation_coef",
            coef,
            "be 0 with rollout.engine openai, whose tokens without a log-prob would be observations",
        )?;
        if let Some(prompts) = self.rollout.prompts_in_flight {
            let step = self.prompts_per_step;
            let must = format!("be from prompts_per_step, {step}, to twice as many");
            let valid = prompts >= step && prompts <= step.saturating_mul(2);
            check::check(valid, "rollout.prompts_in_flight", prompts, &must)?;
        }
        Ok(())
    }

    /// Checks that nothing is set that only a [`Decoder`](candle_grpo_nn::Decoder) has.
    ///
    /// # Errors
    ///
    /// Returns an error that names the field.
    pub(super) fn validate_custom_model(&self) -> Result<()> {
        for (name, is_set) in [
            ("adapters", self.adapters.is_some()),
            ("critic", self.critic.is_some()),
        ] {
            let must = "be absent for a custom model, whose maps have no known names";
            check::check(!is_set, name, "given", must)?;
        }
        check::check(
            self.sampling.max_cache_mib.is_none(),
            "sampling.max_cache_mib",
            "given",
            "be absent for a custom model, whose sequences have no known size",
        )?;
        let must = "be f32 for a custom model";
        for (name, dtype) in [
            ("compute_dtype", self.compute_dtype),
            ("rollout.dtype", self.rollout_dtype()),
        ] {
            check::check(dtype == ComputeDType::F32, name, check::Name(&dtype), must)?;
        }
        check::check(
            self.sequence_ranks == 1,
            "sequence_ranks",
            self.sequence_ranks,
            "be 1 for a custom model, whose attention is not known",
        )?;
        check::check(
            self.router_aux_loss_coef == 0.,
            "router_aux_loss_coef",
            self.router_aux_loss_coef,
            "be 0 for a custom model, whose experts are not known",
        )?;
        check::check(
            self.sharding != Sharding::Full,
            "sharding",
            Name(&self.sharding),
            "be none, optimizer or resident for a custom model, whose blocks are not known",
        )?;
        check::check(
            self.rollout.engine == Engine::Local,
            "rollout.engine",
            check::Name(&self.rollout.engine),
            "be local for a custom model, which the servers do not have",
        )?;
        Ok(())
    }

    /// Number of groups that are sampled at once.
    pub(crate) fn prompts_in_flight(&self) -> usize {
        let step = self.prompts_per_step;
        match (self.rollout.partial, self.rollout.prompts_in_flight) {
            (false, _) => step,
            (true, prompts) => prompts.unwrap_or(step.saturating_mul(2)),
        }
    }

    /// Returns whether a step makes one update of the policy at most.
    fn has_single_update(&self) -> bool {
        let completions = self.prompts_per_step.saturating_mul(self.num_generations);
        self.epochs <= 1 && self.mini_batch_size.is_none_or(|size| size >= completions)
    }

    /// Returns whether the loss reads the old log-probs from the update itself, because the policy
    /// has not changed since they were sampled. `advantage` has the inputs of the advantages.
    pub(super) fn updates_current_policy(&self, advantage: Inputs) -> bool {
        match self.old_log_probs {
            OldLogProbs::Auto => {
                self.has_single_update()
                    && self.recipe.policy_loss.rollout_correction.is_none()
                    && !advantage.contains(Input::OldLogProbs)
            }
            OldLogProbs::Current => true,
            OldLogProbs::Recompute | OldLogProbs::Sampler => false,
        }
    }

    fn validate_old_log_probs(&self) -> Result<()> {
        let refuse = |value: &str, must: &str| check::check(false, "old_log_probs", value, must);
        let without_pass = match self.old_log_probs {
            OldLogProbs::Sampler => Some("sampler"),
            OldLogProbs::Current => Some("current"),
            OldLogProbs::Auto | OldLogProbs::Recompute => None,
        };
        if let (Some(value), Some(_)) = (without_pass, &self.recipe.policy_loss.rollout_correction)
        {
            refuse(
                value,
                "be auto or recompute with recipe.policy_loss.rollout_correction, which compares the sampler with the policy",
            )?;
        }
        let is_structured = self.sampling.structured_outputs.is_some();
        if is_structured && self.old_log_probs == OldLogProbs::Sampler {
            let must = "be auto, recompute or current with sampling.structured_outputs, whose log-probs are those of the tokens that the form allows";
            refuse("sampler", must)?;
        }
        if self.old_log_probs == OldLogProbs::Current {
            if !self.has_single_update() {
                refuse(
                    "current",
                    "be auto, recompute or sampler with several updates a step: only the first one has the policy of the sampler",
                )?;
            }
            if self.recipe.advantage.needs().contains(Input::OldLogProbs) {
                refuse(
                    "current",
                    "be auto, recompute or sampler with a recipe.advantage that needs them",
                )?;
            }
        }
        Ok(())
    }

    /// Returns whether the ranks divide the f32 weights.
    pub(super) fn divides_weights(&self) -> bool {
        let has_adapters = self.adapters.is_some();
        divides_weights(
            &self.optimizer,
            self.compute_dtype,
            has_adapters,
            self.sharding,
        )
    }

    fn validate_sharding(&self) -> Result<()> {
        check::check(
            self.sequence_ranks == 1 || self.recipe.distillation_loss.is_none(),
            "sequence_ranks",
            self.sequence_ranks,
            "be 1 with recipe.distillation_loss, which compares whole distributions of a completion",
        )?;
        check::check(
            self.sequence_ranks == 1 || self.sharding != Sharding::Full,
            "sequence_ranks",
            self.sequence_ranks,
            "be 1 with sharding: full, whose gathers of weights would have no common order with those of keys",
        )?;
        check::check(
            !self.divides_weights() || self.reference_refresh.is_none(),
            "sharding",
            Name(&self.sharding),
            "be none or optimizer with reference_refresh, which reads whole weights",
        )?;
        if self.sharding != Sharding::Full {
            return Ok(());
        }
        ensure_dense(self.sharding, self.base_weights)?;
        check::check(
            self.rollout.max_staleness == 0,
            "rollout.max_staleness",
            self.rollout.max_staleness,
            "be 0 with sharding: full, because a thread that samples ahead copies all weights",
        )?;
        check::check(
            !self.rollout.weight_sync.is_from_gpu(),
            "rollout.weight_sync",
            Name(&self.rollout.weight_sync),
            "be auto or disk with sharding: full: a rank has only its part of the weights",
        )?;
        if let Some(dtype) = self.own_rollout_dtype() {
            let must =
                "be absent with sharding: full, because a copy in another dtype is not divided";
            check::check(false, "rollout.dtype", Name(&dtype), must)?;
        }
        check::check(
            !self.rollout.merge_adapters,
            "rollout.merge_adapters",
            true,
            "be false with sharding: full, because merged copies are not divided",
        )?;
        Ok(())
    }

    fn validate_critic(&self, needs: Needs) -> Result<()> {
        let refuse = |value: &str, must: &str| check::check(false, "critic", value, must);
        match (&self.critic, needs.reads(Source::Critic)) {
            (None, true) => refuse("absent", "be given, as recipe.advantage needs values")?,
            (Some(_), false) => refuse("given", "be absent, as recipe.advantage has no lambda")?,
            (Some(critic), true) => {
                let error = |error| within("critic", error);
                critic.validate().map_err(error)?;
                let optimizer = critic.optimizer.validate();
                optimizer.map_err(|error| within("critic.optimizer", error.into()))?;
                if let Some(option) = in_bf16(&critic.optimizer).next() {
                    let field = format!("critic.optimizer.{option}");
                    let must = "be f32, as the critic computes in f32";
                    check::check(false, &field, "bf16", must)?;
                }
                ensure_memory(&critic.optimizer, false, self.sharding)
                    .map_err(|error| within("critic", error))?;
            }
            (None, false) => {}
        }
        Ok(())
    }

    fn validate_turn_advantage(&self) -> Result<()> {
        let Some(advantage) = &self.turn_advantage else {
            return Ok(());
        };
        advantage
            .validate()
            .map_err(|error| within("turn_advantage", error))?;
        let refuse = |must: &str| check::check(false, "turn_advantage", "given", must);
        if !keeps_components(&self.recipe) {
            refuse(
                "be absent with recipe.reward_shaping, recipe.overlong or recipe.length_penalty, which turns do not have",
            )?;
        }
        if self.critic.is_some() {
            refuse("be absent with a critic, whose returns it does not compute")?;
        }
        Ok(())
    }

    fn validate_role_baselines(&self) -> Result<()> {
        let Some(baselines) = &self.role_baselines else {
            return Ok(());
        };
        baselines
            .validate()
            .map_err(|error| within("role_baselines", error.into()))?;
        for (other, must) in [
            (
                self.turn_advantage.is_some(),
                "be absent with turn_advantage, which also replaces recipe.advantage",
            ),
            (
                self.critic.is_some(),
                "be absent with a critic, whose returns it does not compute",
            ),
            (
                self.recipe.advantage.needs() != Inputs::NONE || self.reward_kl.is_some(),
                "be absent with a recipe.advantage that needs other inputs, such as a KL penalty or greedy completions, and with reward_kl",
            ),
        ] {
            check::check(!other, "role_baselines", "given", must)?;
        }
        Ok(())
    }

    /// Checks that no group is divided, if the loss of a sequence depends on its group.
    fn validate_groups(&self) -> Result<()> {
        if self.recipe.policy_loss.surrogate.level() != LossLevel::Group {
            return Ok(());
        }
        let divides = self.micro_batch_tokens.is_some() || self.resampling.is_some();
        check::check(
            !divides,
            "micro_batch_tokens and resampling",
            "given",
            "be absent with recipe.policy_loss.surrogate, which compares the completions of a group",
        )?;
        let must = format!(
            "hold whole groups of num_generations, {}, as recipe.policy_loss.surrogate compares their completions",
            self.num_generations
        );
        let holds_groups = |size: usize| size.is_multiple_of(self.num_generations);
        let sizes = [
            ("micro_batch_size", self.micro_batch_size),
            ("mini_batch_size", self.mini_batch_size.unwrap_or(0)),
        ];
        for (name, size) in sizes {
            check::check(holds_groups(size), name, size, &must)?;
        }
        Ok(())
    }

    fn validate_reference(&self, needs: Needs) -> Result<()> {
        let Some(refresh) = &self.reference_refresh else {
            return Ok(());
        };
        refresh
            .validate()
            .map_err(|error| within("reference_refresh", error))?;
        let refuse = |must: &str| check::check(false, "reference_refresh", "given", must);
        if !needs.reads(Source::Reference) {
            refuse("be absent, as no KL term in recipe needs a reference")?;
        }
        if self.adapters.is_some() {
            refuse("be absent with adapters, whose reference is the policy without them")?;
        }
        Ok(())
    }

    fn validate_controllers(&self) -> Result<()> {
        if let Some(controller) = &self.reward_kl {
            controller
                .validate()
                .map_err(|error| within("reward_kl", error.into()))?;
            let tokens = self.recipe.advantage.pipeline().tokens;
            check::check(
                tokens.is_some_and(|tokens| tokens.kl_penalty.is_some()),
                "reward_kl",
                "given",
                "be absent, as recipe.advantage has no per-token KL penalty",
            )?;
        }
        check::check(
            self.adaptive_entropy.is_none() || self.recipe.policy_loss.entropy_coef == 0.,
            "adaptive_entropy",
            "given",
            "be absent with recipe.policy_loss.entropy_coef",
        )?;
        Ok(())
    }

    /// Returns the form of the linear maps of the policy in memory, and the dtype of its other
    /// weights: that of the computation under adapters, otherwise that of the master weights.
    pub fn stored_form(&self) -> (BaseWeights, ComputeDType) {
        let has_adapters = self.adapters.is_some();
        stored_form(
            self.base_weights,
            self.compute_dtype,
            has_adapters,
            &self.optimizer,
        )
    }

    /// Returns the division of the policy's weights between the ranks in `collective`, for
    /// [`Pretrained::load_divided`](crate::Pretrained::load_divided). `None` if these settings do
    /// not divide them.
    pub fn division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision> {
        let ranks = (collective, self.sharding);
        let has_adapters = self.adapters.is_some();
        division(&self.optimizer, self.compute_dtype, has_adapters, ranks)
    }

    /// Returns the division of a teacher in this process between the ranks in `collective`, for
    /// [`Pretrained::load_divided`](crate::Pretrained::load_divided). `None` if they do not divide
    /// it: only with [`Sharding::Full`], and without `recipe.distillation_loss`, which reads whole
    /// output layers.
    pub fn teacher_division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision> {
        let divides = self.divides_teachers();
        let division =
            divides.then(|| WeightDivision::frozen(self.compute_dtype.into(), collective));
        division.flatten()
    }

    /// Returns whether ranks that divide all weights gather them while completions are drawn, here
    /// or by servers. These may get adapters again, for which the policy is compared with them.
    pub(super) fn holds_weights(&self) -> bool {
        let rollout = &self.rollout;
        rollout.engine.is_local() || rollout.is_fixed_policy() || self.adapters.is_some()
    }

    /// Returns whether ranks divide the weights of teachers, if there are several ranks.
    pub(super) fn divides_teachers(&self) -> bool {
        self.sharding == Sharding::Full
            && self.recipe.distillation_loss.is_none()
            && self.teacher_samples().is_none()
    }

    /// Returns the settings of demonstrations that a teacher samples, if it does.
    pub fn teacher_samples(&self) -> Option<&TeacherSamplesConfig> {
        self.demonstrations.as_ref()?.teacher_samples.as_ref()
    }

    /// Returns the share of demonstrations in the policy's loss at step `step`: 0 without any, and
    /// while only the critic trains.
    pub(super) fn demonstration_share(&self, step: usize) -> f64 {
        match &self.demonstrations {
            Some(demonstrations) if !self.only_critic_trains(step) => demonstrations.coef.at(step),
            _ => 0.,
        }
    }

    /// Returns whether nothing in step `step` learns from completions of the policy, because the
    /// samples of a teacher are the whole loss.
    pub(super) fn learns_from_teacher_samples_alone(&self, step: usize) -> bool {
        let samples = self.teacher_samples().is_some();
        samples && self.critic.is_none() && self.demonstration_share(step) == 1.
    }

    /// Returns the most prompts for which a step draws completions.
    pub(super) fn most_prompts_per_step(&self) -> usize {
        let rounds = match self.recipe.group_filter {
            Some(_) => self.max_sampling_batches,
            None => 1,
        };
        self.prompts_per_step.saturating_mul(rounds)
    }

    /// Returns whether `step` is one of the warm-up of the critic.
    pub(super) fn only_critic_trains(&self, step: usize) -> bool {
        let critic = self.critic.as_ref();
        critic.is_some_and(|critic| step <= critic.warmup_steps)
    }

    /// Returns whether the number of tokens in a micro-batch is chosen by memory, with
    /// [`MemoryFit`](crate::learn::MemoryFit).
    pub fn fits_micro_batches(&self) -> bool {
        matches!(self.micro_batch_tokens, Some(MicroBatchTokens::Auto(_)))
    }

    /// The bound of a micro-batch.
    ///
    /// # Errors
    ///
    /// If the number of tokens is not chosen yet.
    pub(crate) fn micro_batches(&self) -> Result<MicroBatchSize> {
        Ok(match self.micro_batch_tokens {
            Some(MicroBatchTokens::Tokens(tokens)) => MicroBatchSize::Tokens(tokens),
            Some(MicroBatchTokens::Auto(_)) => {
                let must = "be a number in a trainer: MemoryFit::micro_batch_tokens chooses one";
                return Err(Invalid::new("micro_batch_tokens", "auto", must).into());
            }
            None => MicroBatchSize::Sequences(self.micro_batch_size),
        })
    }

    pub(crate) fn actor(&self) -> ActorConfig {
        ActorConfig {
            policy_loss: self.recipe.policy_loss.clone(),
            optimizer: self.optimizer.clone(),
            temperature: self.sampling.temperature,
            activation_checkpointing: self.activation_checkpointing,
            activation_offloading: self.activation_offloading,
            compute_dtype: self.compute_dtype,
            router_aux_loss_coef: self.router_aux_loss_coef,
            distillation_loss: self.recipe.distillation_loss,
        }
    }
}
