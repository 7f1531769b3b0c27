//! The settings of a training run.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_core::{KlController, SampleFilter, ScoreResampling};
use candle_grpo_loss::{AdaptiveEntropy, Recipe};
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
    /// The policy itself: saves the pass too, where a step makes one update, so that the policy is still the one that drew.
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
    /// Where the data set begins anew, or is smaller than this, a prompt may occur more than once in a step. Each
    /// occurrence then has completions, and a group, of its own.
    pub prompts_per_step: usize,
    /// Completions of each prompt: its group.
    pub num_generations: usize,
    /// How completions are drawn. Its seed decides the order of the prompts too.
    pub sampling: SamplingConfig,
    /// The algorithm: what is done to rewards, which groups a step is made of, how rewards become advantages, and what is
    /// minimised. With a KL term the policy at the start of the run is kept as the reference.
    pub recipe: Recipe,
    /// How often a step samples in place of the groups that [`Recipe::group_filter`] drops, the first time included; it
    /// then trains on what it has. With 1 nothing is sampled in their place.
    pub max_sampling_batches: usize,
    /// Which completions are trained on. The others take part in the statistics of their groups, unless the advantage says
    /// otherwise, and are masked in the loss and its denominators.
    pub sample_filters: Vec<SampleFilter>,
    /// The share of the tokens, those where the policy before the step has the highest entropy, on which the policy term
    /// counts (<https://arxiv.org/abs/2506.01939>; TRL's `top_entropy_quantile`); absent: all.
    pub top_entropy: Option<f64>,
    /// Completions with telling scores are trained on more often: as many as there are, drawn from them with replacement
    /// after advantages are taken (PF-PPO, <https://arxiv.org/abs/2409.06957>).
    pub resampling: Option<ScoreResampling>,
    /// Low-rank adapters to train in place of all parameters. The reference is then the policy without them. Absent: all
    /// parameters train.
    pub adapters: Option<LoraConfig>,
    /// How the reference follows the policy; absent: it stays as it is.
    pub reference_refresh: Option<ReferenceRefresh>,
    /// What steers the coefficient of a KL penalty in the rewards of tokens, in place of the fixed one in the recipe.
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
    /// Whether the policy keeps only the input of each block for the backward pass, and computes the rest again: memory that
    /// hardly grows with the number of blocks, for a third more time.
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
    /// Errs if a field has a value with which no step can be made, or fields contradict each other.
    ///
    /// [`Trainer::new`](crate::Trainer::new) asks this; ask it earlier if there is work to do before.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("prompts_per_step", self.prompts_per_step),
            ("num_generations", self.num_generations),
            ("max_sampling_batches", self.max_sampling_batches),
            ("epochs", self.epochs),
            ("mini_batch_size", self.mini_batch_size.unwrap_or(1)),
            ("micro_batch_size", self.micro_batch_size),
        ] {
            ensure!(value > 0, "{name}: 0, must be at least 1");
        }
        ensure!(
            self.max_grad_norm > 0.,
            "max_grad_norm: {}, must be above 0",
            self.max_grad_norm
        );
        ensure!(
            !self.sampling.greedy,
            "sampling.greedy: true, must be false in training: all completions of a group would be the same"
        );
        ensure_consistent(&self.recipe, self.num_generations)?;
        if let Some(share) = self.top_entropy {
            ensure!(
                share > 0. && share <= 1.,
                "top_entropy: {share}, must be above 0 and at most 1"
            );
        }
        if let Some(ScoreResampling::Power(power)) = self.resampling {
            ensure!(
                power >= 0. && power.is_finite(),
                "resampling.power: {power}, must be finite and at least 0"
            );
        }
        self.validate_old_log_probs()?;
        self.validate_controllers()?;
        self.validate_reference()?;
        self.validate_critic()?;
        self.schedule.validate()?;
        self.sampling.validate()
    }

    fn validate_old_log_probs(&self) -> Result<()> {
        ensure!(
            self.recipe.policy_loss.rollout_correction.is_none()
                || self.old_log_probs == OldLogProbs::Recompute,
            "old_log_probs: {:?}, must be Recompute with recipe.policy_loss.rollout_correction, which compares the sampler with the policy",
            self.old_log_probs
        );
        if self.old_log_probs == OldLogProbs::Current {
            let completions = self.prompts_per_step.saturating_mul(self.num_generations);
            ensure!(
                self.epochs == 1 && self.mini_batch_size.is_none_or(|size| size >= completions),
                "old_log_probs: Current, must be another with {} epochs and mini-batches of {:?} of {completions} completions: from the second update on the policy is not the one that drew",
                self.epochs,
                self.mini_batch_size
            );
            ensure!(
                !RecipeInputs::new(&self.recipe).old_log_probs,
                "old_log_probs: Current, must be another with recipe.advantage, which is taken from them"
            );
        }
        Ok(())
    }

    fn validate_critic(&self) -> Result<()> {
        match (&self.critic, RecipeInputs::new(&self.recipe).values) {
            (None, true) => {
                bail!("critic: absent, must be given, as recipe.advantage needs the values of one")
            }
            (Some(_), false) => bail!(
                "critic: given, but recipe.advantage has no lambda, so that nothing needs its values"
            ),
            (Some(critic), true) => critic.validate().context("critic"),
            (None, false) => Ok(()),
        }
    }

    fn validate_reference(&self) -> Result<()> {
        let Some(refresh) = &self.reference_refresh else {
            return Ok(());
        };
        refresh.validate().context("reference_refresh")?;
        ensure!(
            RecipeInputs::new(&self.recipe).reference,
            "reference_refresh: given, but no KL term in recipe needs a reference"
        );
        ensure!(
            self.adapters.is_none(),
            "reference_refresh: given together with adapters, whose reference is the policy without them; leave one out"
        );
        Ok(())
    }

    fn validate_controllers(&self) -> Result<()> {
        if let Some(controller) = &self.reward_kl {
            controller.validate().context("reward_kl")?;
            let tokens = self.recipe.advantage.pipeline().tokens;
            ensure!(
                tokens.is_some_and(|tokens| tokens.kl_penalty.is_some()),
                "reward_kl: given, but recipe.advantage has no kl_penalty in its stage of tokens that it could steer"
            );
        }
        ensure!(
            self.adaptive_entropy.is_none() || self.recipe.policy_loss.entropy_coef == 0.,
            "adaptive_entropy: given together with recipe.policy_loss.entropy_coef, must be one of them"
        );
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
