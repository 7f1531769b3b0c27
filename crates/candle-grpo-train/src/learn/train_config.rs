//! The settings of a training run.

use anyhow::{Error, Result};
use candle_grpo_core::validate as check;
use candle_grpo_core::{Invalid, KlController, SampleFilter, ScoreResampling};
use candle_grpo_loss::{AdaptiveEntropy, EntropyTokens, Recipe};
use candle_grpo_nn::{AdamWConfig, LoraConfig};
use serde::{Deserialize, Serialize};

use super::recipe_inputs::{RecipeInputs, ensure_consistent};
use crate::{
    ActorConfig, ComputeDType, CriticConfig, LearningRateSchedule, ReferenceRefresh, SamplingConfig,
};

/// Where the log-probs that the ratio of an update refers to come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// A forward pass of the policy before the first update of the step: right for any sampler.
    #[default]
    Recompute,
    /// What the sampler recorded while it drew: saves the pass. Here they differ by rounding only.
    Sampler,
    /// The policy itself: saves the pass too, where a step makes one update, so that the policy is
    /// still the one that drew.
    Current,
}

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
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Prompts in a step.
    ///
    /// Where the data set begins anew, or is smaller than this, a prompt may occur more than once
    /// in a step. Each occurrence then has completions, and a group, of its own.
    pub prompts_per_step: usize,
    /// Completions of each prompt: its group.
    pub num_generations: usize,
    /// How completions are drawn. Its seed decides the order of the prompts too.
    pub sampling: SamplingConfig,
    /// The algorithm: what is done to rewards, which groups a step is made of, how rewards become
    /// advantages, and what is minimised. With a KL term the policy at the start of the run is
    /// kept as the reference.
    pub recipe: Recipe,
    /// How often a step samples in place of the groups that [`Recipe::group_filter`] drops, the
    /// first time included; it then trains on what it has. With 1 nothing is sampled in their
    /// place.
    pub max_sampling_batches: usize,
    /// Which completions are trained on. The others take part in the statistics of their groups,
    /// unless the advantage says otherwise, and are masked in the loss and its denominators.
    pub sample_filters: Vec<SampleFilter>,
    /// The share of the tokens, those where the policy before the step has the highest entropy, on
    /// which the policy term counts (<https://arxiv.org/abs/2506.01939>; TRL's `top_entropy_quantile`); absent: all.
    pub top_entropy: Option<f64>,
    /// Completions with telling scores are trained on more often: as many as there are, drawn from
    /// them with replacement after advantages are taken (PF-PPO, <https://arxiv.org/abs/2409.06957>).
    pub resampling: Option<ScoreResampling>,
    /// Low-rank adapters to train in place of all parameters. The reference is then the policy
    /// without them. Absent: all parameters train.
    pub adapters: Option<LoraConfig>,
    /// How the reference follows the policy; absent: it stays as it is.
    pub reference_refresh: Option<ReferenceRefresh>,
    /// What steers the coefficient of a KL penalty in the rewards of tokens, in place of the fixed
    /// one in the recipe.
    pub reward_kl: Option<KlController>,
    /// What steers the coefficient of the entropy bonus, in place of the fixed one in the recipe.
    pub adaptive_entropy: Option<AdaptiveEntropy>,
    /// How the critic learns whose values the advantage needs, if it does: GAE.
    pub critic: Option<CriticConfig>,
    /// Where the log-probs that the ratio refers to come from.
    pub old_log_probs: OldLogProbs,
    /// How often a step goes through its completions.
    pub epochs: usize,
    /// Completions for each optimiser step; absent: all of the step.
    pub mini_batch_size: Option<usize>,
    /// Completions for each backward pass. It bounds the memory and does not change the update.
    pub micro_batch_size: usize,
    /// Whether the policy keeps only the input of each block for the backward pass, and computes
    /// the rest again: memory that hardly grows with the number of blocks, for a third more
    /// time.
    pub activation_checkpointing: bool,
    /// What policy and reference compute in. The weights that train are f32 whatever it is.
    pub compute_dtype: ComputeDType,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// How the learning rate changes.
    pub schedule: LearningRateSchedule,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f64,
}

impl Default for TrainConfig {
    /// GRPO.
    fn default() -> Self {
        Self {
            prompts_per_step: 32,
            num_generations: 8,
            sampling: SamplingConfig::default(),
            recipe: Recipe::grpo(),
            max_sampling_batches: 10,
            sample_filters: Vec::new(),
            top_entropy: None,
            resampling: None,
            adapters: None,
            reference_refresh: None,
            reward_kl: None,
            adaptive_entropy: None,
            critic: None,
            old_log_probs: OldLogProbs::default(),
            epochs: 1,
            mini_batch_size: None,
            micro_batch_size: 32,
            activation_checkpointing: false,
            compute_dtype: ComputeDType::F32,
            optimizer: AdamWConfig {
                learning_rate: 1e-6,
                ..AdamWConfig::default()
            },
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
    /// Returns an error with an [`Invalid`] in it that names the field that is not valid or
    /// contradicts another.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("prompts_per_step", self.prompts_per_step),
            ("num_generations", self.num_generations),
            ("max_sampling_batches", self.max_sampling_batches),
            ("epochs", self.epochs),
            ("mini_batch_size", self.mini_batch_size.unwrap_or(1)),
            ("micro_batch_size", self.micro_batch_size),
        ] {
            check::at_least_one(name, value)?;
        }
        check::positive("max_grad_norm", self.max_grad_norm)?;
        check::check(
            !self.sampling.greedy,
            "sampling.greedy",
            true,
            "be false in training: all completions of a group would be the same",
        )?;
        ensure_consistent(&self.recipe, self.num_generations)?;
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
                check::range(&format!("sample_filters[{i}].difficulty"), [low, high])?;
            }
        }
        self.optimizer
            .validate()
            .map_err(|error| within("optimizer", error.into()))?;
        self.validate_old_log_probs()?;
        self.validate_controllers()?;
        self.validate_reference()?;
        self.validate_critic()?;
        self.schedule
            .validate()
            .map_err(|error| within("schedule", error))?;
        self.sampling
            .validate()
            .map_err(|error| within("sampling", error))
    }

    fn validate_old_log_probs(&self) -> Result<()> {
        let refuse = |value: &str, must: &str| check::check(false, "old_log_probs", value, must);
        if self.recipe.policy_loss.rollout_correction.is_some()
            && self.old_log_probs != OldLogProbs::Recompute
        {
            let value = match self.old_log_probs {
                OldLogProbs::Sampler => "sampler",
                _ => "current",
            };
            refuse(
                value,
                "be recompute with recipe.policy_loss.rollout_correction, which compares the sampler with the policy",
            )?;
        }
        if self.old_log_probs == OldLogProbs::Current {
            let completions = self.prompts_per_step.saturating_mul(self.num_generations);
            if self.epochs > 1 || self.mini_batch_size.is_some_and(|size| size < completions) {
                refuse(
                    "current",
                    "be recompute or sampler with several updates a step: only the first one has the policy of the sampler",
                )?;
            }
            if RecipeInputs::new(&self.recipe).old_log_probs {
                refuse(
                    "current",
                    "be recompute or sampler with a recipe.advantage that needs them",
                )?;
            }
        }
        Ok(())
    }

    fn validate_critic(&self) -> Result<()> {
        let refuse = |value: &str, must: &str| check::check(false, "critic", value, must);
        match (&self.critic, RecipeInputs::new(&self.recipe).values) {
            (None, true) => refuse("absent", "be given, as recipe.advantage needs values")?,
            (Some(_), false) => refuse("given", "be absent, as recipe.advantage has no lambda")?,
            (Some(critic), true) => {
                let error = |error| within("critic", error);
                critic.validate().map_err(error)?;
                let optimizer = critic.optimizer.validate();
                optimizer.map_err(|error| within("critic.optimizer", error.into()))?;
            }
            (None, false) => {}
        }
        Ok(())
    }

    fn validate_reference(&self) -> Result<()> {
        let Some(refresh) = &self.reference_refresh else {
            return Ok(());
        };
        refresh
            .validate()
            .map_err(|error| within("reference_refresh", error))?;
        let refuse = |must: &str| check::check(false, "reference_refresh", "given", must);
        if !RecipeInputs::new(&self.recipe).reference {
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

    pub(crate) fn actor(&self) -> ActorConfig {
        ActorConfig {
            policy_loss: self.recipe.policy_loss.clone(),
            optimizer: self.optimizer.clone(),
            temperature: self.sampling.temperature,
            activation_checkpointing: self.activation_checkpointing,
            compute_dtype: self.compute_dtype,
        }
    }
}

/// Returns the error of an option of `section`, with the path from the settings.
pub(crate) fn within(section: &str, error: Error) -> Error {
    match find_invalid(&error) {
        Some(invalid) => invalid.clone().within(section).into(),
        None => error.context(section.to_owned()),
    }
}

/// Finds the invalid option that caused `error`, if it has such a cause.
pub fn find_invalid(error: &Error) -> Option<&Invalid> {
    error.chain().find_map(|cause| {
        let of_candle = || Invalid::find(cause.downcast_ref::<candle_core::Error>()?);
        cause.downcast_ref::<Invalid>().or_else(of_candle)
    })
}
