//! The parts of a trainer.

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_core::AdvantageEstimator;
use candle_grpo_core::selection::{DifficultyPools, TaskScores};
use candle_grpo_core::validate::check;
use candle_grpo_loss::TokenLoss;
use candle_grpo_loss::surrogate::LossLevel;
use candle_grpo_nn::{DecoderConfig, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use super::ahead::Ahead;
use super::collector::{Collect, Collector};
use super::demonstrations::{DemonstrationPart, DemonstrationSource};
use super::models::Models;
use super::needs::Needs;
use super::teachers::{TeacherChoice, TeacherPart};
use super::{Ranks, Trainer, TrainerState};
use crate::data::MixedOrder;
use crate::data::curriculum::Curriculum;
use crate::rollout::{LocalGenerator, Trajectories};
use crate::{Generator, Progress, Prompt, RewardFunction, TrainConfig};
use candle_grpo_base::progress::NoProgress;
use candle_grpo_base::within;

/// The parts of a [`Trainer`]. [`Self::new`] has those that every run has, and the others are
/// fields to set.
///
/// ```no_run
/// use std::sync::Arc;
///
/// # use candle_grpo_train::{Prompt, Sample, Trainer, TrainConfig, TrainerParts, data::MixedOrder};
/// # fn run(config: TrainConfig, prompts: Vec<Prompt>, model: candle_grpo_train::Pretrained, seed: u64) -> anyhow::Result<()> {
/// let shorter = |sample: &Sample| -(sample.completion.len() as f32);
/// let order = MixedOrder::single(prompts.len(), seed)?;
/// let mut trainer = Trainer::new(TrainerParts {
///     order: Some(order),
///     last_step: 100,
///     ..TrainerParts::new(model.model, model.parameters, model.tokenizer, prompts, shorter, config)
/// })?;
/// # trainer.step()?;
/// # Ok(())
/// # }
/// ```
pub struct TrainerParts<C: ModelConfig = DecoderConfig> {
    /// The shape of the policy.
    pub model: C,
    /// The weights that it starts from.
    pub parameters: Parameters,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The prompts to train on, at least one.
    pub prompts: Vec<Prompt>,
    /// The reward.
    pub reward: Box<dyn RewardFunction>,
    /// The settings.
    pub config: TrainConfig,
    /// Draws completions in place of the policy in this process. It receives the weights before
    /// the first completion and after each update.
    pub generator: Option<Arc<dyn Generator<C>>>,
    /// Trajectories of several turns, in steps and evaluations. Their rewards are a component of
    /// the reward.
    pub environments: Option<Arc<dyn Trajectories>>,
    /// The order of the prompts; absent: a random order of all.
    pub order: Option<MixedOrder>,
    /// Draws prompts by the pools of their latest mean rewards, in place of an order. The scores
    /// are a part of [`TrainerState`].
    ///
    /// A step has no prompt twice while there are others. Completions that are drawn ahead have
    /// the prompts for the scores of the step at which they are requested.
    pub curriculum: Option<DifficultyPools>,
    /// The last step of the run. No completions are drawn ahead for later ones.
    pub last_step: usize,
    /// Computes advantages in place of the estimator in the recipe.
    ///
    /// It receives rewards, groups, response mask, the inputs that it declares
    /// ([`AdvantageEstimator::needs`]), and those that recipe and loss need.
    pub estimator: Option<Box<dyn AdvantageEstimator>>,
    /// The policy to learn from, for
    /// [`TokenAdvantage::distillation`](candle_grpo_core::TokenAdvantage::distillation),
    /// [`PolicyLoss::distillation`](candle_grpo_loss::PolicyLoss::distillation) and
    /// [`Recipe::distillation_loss`](candle_grpo_loss::Recipe::distillation_loss). It must have
    /// the tokens of the policy.
    pub teacher: Option<TeacherPart>,
    /// The source of [`TrainConfig::demonstrations`].
    pub demonstrations: Option<DemonstrationPart<C>>,
    /// The receiver of progress, which can also cancel steps.
    pub progress: Arc<dyn Progress>,
    /// The ranks that share every step: prompts, scores, passes over the models and gradients. The
    /// trainers of all ranks must have the same parts, and call the same methods in the same
    /// order.
    ///
    /// All quantities of a step are those of all ranks, and every rank ends a step with the same
    /// weights. They equal those of one rank up to the rounding of sums. The random numbers of a
    /// completion do not depend on the number of ranks.
    ///
    /// The ranks divide what [`TrainConfig::sharding`] says.
    ///
    /// Progress cancels before a step only, on all ranks if it does on one. After any other error
    /// of one rank the others wait for it: it must end the job with [`Collective::abort`].
    pub collective: Arc<dyn Collective>,
    /// The digest of the initial weights, such as
    /// [`RunInputs::parameters_sha256`](crate::run::RunInputs::parameters_sha256). Absent:
    /// checkpoints compute it.
    pub parameters_sha256: Option<String>,
}

impl<C: ModelConfig> TrainerParts<C> {
    /// Creates the parts of a run of one process, whose policy draws the completions itself.
    pub fn new(
        model: C,
        parameters: Parameters,
        tokenizer: Tokenizer,
        prompts: Vec<Prompt>,
        reward: impl RewardFunction + 'static,
        config: TrainConfig,
    ) -> Self {
        Self {
            model,
            parameters,
            tokenizer,
            prompts,
            reward: Box::new(reward),
            config,
            generator: None,
            environments: None,
            order: None,
            curriculum: None,
            last_step: usize::MAX,
            estimator: None,
            teacher: None,
            demonstrations: None,
            progress: Arc::new(NoProgress),
            collective: Arc::new(Alone),
            parameters_sha256: None,
        }
    }

    /// Checks what concerns several parts.
    fn validate(&self) -> Result<()> {
        check(
            self.config.demonstrations.is_none() || self.demonstrations.is_some(),
            "demonstrations",
            "none",
            "be given, as the settings have them",
        )?;
        if let Some(DemonstrationPart::Teacher(_)) = &self.demonstrations {
            check(
                self.environments.is_none(),
                "demonstrations",
                "a teacher",
                "be rows with environments, in which only the policy acts",
            )?;
        }
        let rollout = &self.config.rollout;
        let must = "be false with a generator of your own, which merges them itself";
        let valid = self.generator.is_none() || !rollout.merge_adapters;
        check(valid, "rollout.merge_adapters", true, must)?;
        let continuing = [
            ("rollout.partial", rollout.partial),
            ("rollout.in_flight_updates", rollout.in_flight_updates),
        ];
        for (name, continues) in continuing {
            let must = "be false with environments, whose trajectories end in their step";
            let valid = !continues || self.environments.is_none();
            check(valid, name, continues, must)?;
        }
        let recipe = &self.config.recipe;
        check(
            recipe.distillation_loss.is_none() || self.teacher.is_some(),
            "teacher",
            "none",
            "be given, as recipe.distillation_loss learns from it",
        )?;
        if let Some(teacher) = &self.teacher {
            let valid = teacher.validate(&self.config);
            valid.map_err(|error| within("teacher", error))?;
        }
        let world_size = self.collective.world_size();
        for (name, continues) in continuing {
            let must =
                format!("be false with {world_size} processes, each of which ends its own part");
            check(world_size == 1 || !continues, name, continues, &must)?;
        }
        let must = format!(
            "be false with {world_size} processes: the server would wait for the memory of one of them only"
        );
        let sleeps = rollout.sleep_mode;
        check(
            world_size == 1 || !sleeps,
            "rollout.sleep_mode",
            sleeps,
            &must,
        )?;
        let teams = self.config.sequence_ranks;
        let must = format!("divide the number of processes, {world_size}");
        // The settings refuse 0.
        let is_valid = teams == 0 || world_size.is_multiple_of(teams);
        check(is_valid, "sequence_ranks", teams, &must)?;
        let must = format!("be another one with {world_size} processes, which share out sequences");
        Ok(check(
            world_size == 1 || recipe.policy_loss.surrogate.level() != LossLevel::Group,
            "recipe.policy_loss.surrogate",
            "compares the sequences of a group",
            &must,
        )?)
    }
}

impl<C: ModelConfig> Trainer<C> {
    /// Creates a trainer.
    ///
    /// # Errors
    ///
    /// If there are no prompts, the settings are not valid, or not for a custom model, or parts do
    /// not fit together.
    pub fn new(parts: TrainerParts<C>) -> Result<Self> {
        parts.validate()?;
        let config = Arc::new(parts.config);
        let needs = Needs::new(&config, parts.estimator.as_deref());
        let collective = &parts.collective;
        let mut models =
            Models::with_needs(parts.model, parts.parameters, &config, needs, collective)?;
        if let Some(teacher) = &parts.teacher {
            models.learn_from(teacher)?;
        }
        let longest_row = models.model.max_positions();
        let teacher = parts.teacher.as_ref();
        let teacher = teacher.map(|teacher| TeacherChoice::new(teacher, longest_row));
        let teacher = teacher.transpose()?;
        if let Some(sha256) = parts.parameters_sha256 {
            models.base_sha256 = sha256.into();
        }
        let mut state = TrainerState::new(&config);
        let sampler = models.sampler(config.sampling.clone())?;
        let mut collector = Collector::new(
            sampler,
            parts.tokenizer,
            parts.prompts,
            parts.reward,
            Arc::clone(&config),
            needs,
        )?;
        let draws_itself = parts.generator.is_none();
        if let Some(generator) = parts.generator {
            collector = collector.with_generator(generator);
        } else if config.rollout.merge_adapters || config.own_rollout_dtype().is_some() {
            let (weights, dtype) = (models.weights(0), config.rollout_dtype());
            let generator = if config.rollout.merge_adapters {
                LocalGenerator::merged(&weights, dtype)
            } else {
                LocalGenerator::in_dtype(&weights, dtype)
            };
            let generator = generator?.with_recorded_steps(true);
            collector = collector.with_generator(Arc::new(generator));
        }
        if let Some(environments) = parts.environments {
            collector = collector.with_environments(environments);
        }
        if let Some(order) = parts.order {
            order.ensure_rows(collector.prompts.len(), "prompts")?;
            collector.order = order;
        }
        if let Some(pools) = parts.curriculum {
            state.task_scores = Some(TaskScores::default());
            collector.curriculum = Some(Curriculum::new(pools, config.sampling.seed)?);
        }
        let ranks = Ranks::new(parts.collective).in_teams(config.sequence_ranks)?;
        let collector = collector.with_ranks(ranks);
        let demonstrations = parts.demonstrations;
        let demonstrations = demonstrations.map(|part| DemonstrationSource::new(part, &collector));
        let source: Box<dyn Collect<C>> = match config.rollout.max_staleness {
            0 => Box::new(collector.clone()),
            _ => Box::new(Ahead::new(collector.clone(), draws_itself, parts.last_step)),
        };
        let mut trainer = Self {
            models,
            config,
            needs,
            estimator: parts.estimator,
            teacher,
            teachers_answer: false,
            collector,
            source,
            demonstrations: demonstrations.transpose()?,
            receiver: Arc::new(NoProgress),
            progress: Arc::new(NoProgress),
            state,
            last: None,
            torn: false,
        };
        trainer.set_progress(parts.progress);
        Ok(trainer)
    }
}
