//! The training loop.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_grpo_collective::Collective;
use candle_grpo_core::{AdvantageEstimator, DifficultyPools, TaskScores};
use candle_grpo_nn::{ComputeDType, DecoderConfig, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use super::ahead::Ahead;
use super::collector::{Collection, Collector};
use super::demonstrations::Demonstrations;
use super::models::Models;
use super::needs::{Needs, Source};
use super::rollout_groups::record;
use super::rollout_log::StepRollouts;
use super::staleness::staleness_metrics;
use super::step::{Passes, StepBatch, advantages, signals, update};
use super::{RolloutLogConfig, RolloutRecord, Teacher, TrainerState};
use crate::data::MixedOrder;
use crate::data::curriculum::Curriculum;
use crate::environment::{Environments, ensure_some_worked};
use crate::ranks::Ranks;
use crate::rollout::{LocalGenerator, PolicyWeights};
use crate::run::RunInputs;
use crate::{
    Actor, Critic, Generator, Pretrained, Progress, Prompt, RewardFunction, Rollout, Sampler,
    SamplingConfig, Sequence, StepMetrics, TrainConfig,
};
use candle_grpo_base::progress::NoProgress;
use candle_grpo_base::within;

/// Trains a policy with rewards. A step samples completions, scores them, computes advantages and
/// updates the policy.
///
/// The policy is a [`Decoder`](candle_grpo_nn::Decoder), or a custom model with the configuration
/// `C`. It trains with the same operators, is sampled by [`LanguageModel::decoding`] and saved by
/// [`Self::write_custom_checkpoint`]. Adapters, a critic, other dtypes than f32 and the engines of
/// [`TrainConfig::rollout`] need a decoder.
///
/// [`LanguageModel::decoding`]: candle_grpo_nn::LanguageModel::decoding
pub struct Trainer<C: ModelConfig = DecoderConfig> {
    models: Models<C>,
    config: Arc<TrainConfig>,
    needs: Needs,
    /// A custom estimator in place of the one in the recipe.
    estimator: Option<Box<dyn AdvantageEstimator>>,
    collector: Collector<C>,
    /// The examples of [`TrainConfig::demonstrations`].
    demonstrations: Option<Demonstrations>,
    /// True if the policy in this process draws the completions.
    draws_itself: bool,
    /// The thread that draws the completions of later steps, if there is one.
    ahead: Option<Ahead<C>>,
    /// The last step for which completions are drawn ahead.
    last_step: usize,
    /// The receiver of progress.
    receiver: Arc<dyn Progress>,
    /// The progress of what runs within a step. One of several ranks cannot cancel alone.
    progress: Arc<dyn Progress>,
    state: TrainerState,
    /// The completions of the last step.
    last: Option<StepRollouts>,
    /// True if a step failed after it had changed weights.
    torn: bool,
}

impl<C: ModelConfig> Trainer<C> {
    /// Creates a trainer that starts from `parameters`, of shape `model`, and draws completions
    /// from the policy in this process.
    ///
    /// # Errors
    ///
    /// If there are no prompts, or `config` is not valid, or not for a custom model.
    pub fn new(
        model: C,
        parameters: Parameters,
        tokenizer: Tokenizer,
        prompts: Vec<Prompt>,
        reward: impl RewardFunction + 'static,
        config: TrainConfig,
    ) -> Result<Self> {
        config.validate()?;
        let needs = Needs::new(&config, None);
        let models = Models::with_needs(model, parameters, &config, needs)?;
        let state = TrainerState::new(&config);
        let sampler = models.sampler(config.sampling.clone())?;
        let config = Arc::new(config);
        let mut collector = Collector::new(
            sampler,
            tokenizer,
            prompts,
            reward,
            Arc::clone(&config),
            needs,
        )?;
        if let Some(dtype) = config.own_rollout_dtype() {
            let generator = LocalGenerator::in_dtype(&models.weights(0), dtype)?;
            let generator = generator.with_recorded_steps(true);
            collector = collector.with_generator(Arc::new(generator));
        }
        Ok(Self {
            collector,
            models,
            config,
            needs,
            estimator: None,
            demonstrations: None,
            draws_itself: true,
            ahead: None,
            last_step: usize::MAX,
            receiver: Arc::new(NoProgress),
            progress: Arc::new(NoProgress),
            state,
            last: None,
            torn: false,
        })
    }

    /// Draws completions from `generator` in place of the policy in this process. The generator
    /// receives the weights before the first completion and after each update.
    pub fn with_generator(mut self, generator: Arc<dyn Generator<C>>) -> Self {
        self.ahead = None;
        self.draws_itself = false;
        self.collector = self.collector.with_generator(generator);
        self
    }

    /// Draws trajectories of several turns with `environments`, in steps and evaluations. Their
    /// rewards are a component of the reward.
    pub fn with_environments(mut self, environments: Arc<Environments>) -> Self {
        self.ahead = None;
        self.collector = self.collector.with_environments(environments);
        self
    }

    /// Visits the prompts in `order`, in place of a random order of all prompts.
    ///
    /// # Errors
    ///
    /// If it has another number of rows than there are prompts.
    pub fn with_order(mut self, order: MixedOrder) -> Result<Self> {
        order.ensure_rows(self.collector.prompts.len(), "prompts")?;
        self.ahead = None;
        self.collector = self.collector.with_order(order);
        Ok(self)
    }

    /// Draws prompts by the pools of their latest mean rewards, in place of an order. The scores
    /// are a part of [`TrainerState`].
    ///
    /// A step has no prompt twice while there are others. Completions that are drawn ahead have the
    /// prompts for the scores of the step at which they are requested.
    ///
    /// # Errors
    ///
    /// If an option of the pools is not valid, or prompts without a score have no weight.
    pub fn with_curriculum(mut self, pools: DifficultyPools) -> Result<Self> {
        let curriculum = Curriculum::new(pools, self.config.sampling.seed)?;
        self.ahead = None;
        self.state.task_scores = Some(TaskScores::default());
        self.collector = self.collector.with_curriculum(curriculum);
        Ok(self)
    }

    /// Sets the last step of the run. No completions are drawn ahead for later ones.
    pub fn with_last_step(mut self, step: usize) -> Self {
        self.last_step = step;
        self
    }

    /// Computes advantages with `estimator` in place of the one in the recipe.
    ///
    /// It receives everything that the run has: rewards, groups, response mask, log-probs of the
    /// old policy (unless [`TrainConfig::old_log_probs`] is `Current`), and those of reference
    /// and teacher if there are any.
    pub fn with_advantage_estimator(
        mut self,
        estimator: impl AdvantageEstimator + 'static,
    ) -> Self {
        self.needs = Needs::new(&self.config, Some(&estimator));
        self.estimator = Some(Box::new(estimator));
        self
    }

    /// Sets the policy to learn from, for
    /// [`TokenAdvantage::distillation`](candle_grpo_core::TokenAdvantage::distillation),
    /// [`PolicyLoss::distillation`](candle_grpo_loss::PolicyLoss::distillation) and
    /// [`Recipe::distillation_loss`](candle_grpo_loss::Recipe::distillation_loss). It must have the
    /// tokens of the policy.
    pub fn with_teacher(mut self, teacher: Arc<dyn Teacher>) -> Self {
        self.models.teacher = Some(teacher);
        self
    }

    /// Sets the demonstrations of [`TrainConfig::demonstrations`], which steps visit in `order`,
    /// such as [`MixedOrder::single`].
    ///
    /// # Errors
    ///
    /// If the settings have no demonstrations, or `order` has another number of rows.
    pub fn with_demonstrations(
        mut self,
        examples: Vec<Sequence>,
        order: MixedOrder,
    ) -> Result<Self> {
        let config = self.config.demonstrations.with_context(|| {
            format!(
                "demonstrations: {}, must be none, as the settings have no demonstrations",
                examples.len()
            )
        })?;
        self.demonstrations = Some(Demonstrations::new(config, examples, order)?);
        Ok(self)
    }

    /// Sets the receiver of progress, which can also cancel steps.
    pub fn with_progress(mut self, progress: Arc<dyn Progress>) -> Self {
        self.set_progress(progress);
        self
    }

    /// Shares every step with the other ranks of `collective`: prompts, scores, passes over the
    /// models and gradients. The trainers of all ranks must have the same arguments, and call the
    /// same methods in the same order.
    ///
    /// All quantities of a step are those of all ranks, and every rank ends a step with the same
    /// weights. They equal those of one rank up to the rounding of sums. The random numbers of a
    /// completion do not depend on the number of ranks.
    ///
    /// With [`TrainConfig::sharded_optimizer`] the ranks share the state of the optimizers.
    ///
    /// Progress cancels before a step only, on all ranks if it does on one. After any other error
    /// of one rank the others wait for it: it must end the job with [`Collective::abort`].
    ///
    /// # Errors
    ///
    /// If the state of the optimizers cannot be allocated.
    pub fn with_collective(mut self, collective: Arc<dyn Collective>) -> Result<Self> {
        self.ahead = None;
        if self.config.sharded_optimizer {
            self.models.actor.shard_optimizer(&collective)?;
            if let Some(critic) = &mut self.models.critic {
                critic.shard_optimizer(&collective)?;
            }
        }
        self.collector = self.collector.with_ranks(Ranks::new(collective));
        self.set_progress(Arc::clone(&self.receiver));
        Ok(self)
    }

    /// The ranks that share the steps.
    pub fn ranks(&self) -> &Ranks {
        self.collector.ranks()
    }

    /// Checks that all ranks have the weights of rank 0, bit-identically, and as many steps. All
    /// ranks must call it. Does nothing with one rank.
    ///
    /// # Errors
    ///
    /// If a rank differs.
    pub fn ensure_equal_ranks(&self) -> Result<()> {
        self.models.ensure_equal(self.ranks(), self.state.steps)
    }

    fn set_progress(&mut self, receiver: Arc<dyn Progress>) {
        self.progress = self.ranks().progress_of_step(&receiver);
        let progress = Arc::clone(&self.progress);
        self.collector.progress.set_receiver(progress);
        self.receiver = receiver;
    }

    /// Returns [`Interrupted`](crate::Interrupted) as an error if the progress of any rank cancels.
    /// All ranks must call it.
    ///
    /// # Errors
    ///
    /// Also if another rank has ended.
    pub fn ensure_not_canceled(&self) -> Result<()> {
        self.ranks().ensure_not_canceled(&*self.receiver)
    }

    /// Runs one training step.
    ///
    /// With [`RolloutConfig::max_staleness`](crate::rollout::RolloutConfig::max_staleness) above 0
    /// another thread draws and scores the completions of the next steps meanwhile. It continues
    /// until [`Self::finish`], an error, or the end of the trainer. Its errors and panics are
    /// errors of the step that needs its completions. After an error, completions that were
    /// drawn ahead are drawn again.
    ///
    /// If all advantages are 0 and no other term has a signal, or the filters drop all completions,
    /// the step trains on the demonstrations alone. Without any the policy does not change, and
    /// the step counts as skipped.
    ///
    /// # Errors
    ///
    /// With [`Interrupted`](crate::Interrupted) if the progress cancels before the first update of
    /// the step, and with [`NotFinite`](crate::NotFinite) if a loss or gradient is NaN or
    /// infinite. After an error the trainer is as before the step, unless an earlier mini-batch
    /// of the step has already changed weights: then every further step and every checkpoint is
    /// an error, and the run must be resumed from a checkpoint.
    pub fn step(&mut self) -> Result<StepMetrics> {
        self.ensure_whole()?;
        let step = self.state.steps + 1;
        self.models.updated = false;
        let result = self.try_step();
        if result.is_err() {
            self.ahead = None;
            self.torn = self.models.updated;
            self.models.zero_grad();
        }
        result.with_context(|| format!("step {step}"))
    }

    /// Collects completions, prepares the batch, updates the models, and finally commits the state.
    fn try_step(&mut self) -> Result<StepMetrics> {
        ensure!(
            self.config.demonstrations.is_some() == self.demonstrations.is_some(),
            "demonstrations: none, must be given by with_demonstrations, as the settings have them"
        );
        ensure!(
            self.config.recipe.distillation_loss.is_none() || self.models.teacher.is_some(),
            "teacher: none, must be given by with_teacher, as recipe.distillation_loss learns from it"
        );
        self.ensure_not_canceled()?;
        self.last = None;
        let mut state = self.state.clone();
        state.steps += 1;
        let collection = self.collect()?;
        state.visited = collection.visited;
        let all = &collection.all;
        ensure_some_worked(all.rollouts.iter().map(Rollout::failure))?;
        if let Some(scores) = &mut state.task_scores {
            record(scores, all)?;
        }
        let mut metrics = StepMetrics::of_groups(state.steps, all);
        let start = Instant::now();
        metrics.kept_groups = collection.kept.len();
        let (batch, reason) = self.prepare(&collection, &mut state)?;
        let mut means = vec![None; all.rollouts.len()];
        if let Some(batch) = &batch {
            let n = all.num_generations;
            let kept = batch.mean_advantages()?;
            for (&group, kept) in collection.kept.iter().zip(kept.chunks(n)) {
                means[group * n..(group + 1) * n].copy_from_slice(kept);
            }
        }
        let batch = batch.filter(|_| reason.is_none());
        let demonstrations = self.demonstrations.as_ref();
        metrics.skip_reason = reason;
        metrics.skipped = batch.is_none()
            && demonstrations.is_none_or(|found| found.share(&self.config, state.steps) == 0.);
        if !metrics.skipped {
            let passes = passes(&self.config, self.collector.ranks(), &*self.progress);
            let (config, batch) = (&self.config, batch.as_ref());
            let found = update(
                batch,
                &mut self.models,
                demonstrations,
                config,
                &mut state,
                passes,
            )?;
            metrics.add_updates(found);
        }
        if self.config.rollout.max_staleness > 0 {
            let version = self.weights().version;
            metrics
                .policy
                .extend(staleness_metrics(&collection, version)?);
        }
        if let (Some(curriculum), Some(scores)) = (self.collector.curriculum(), &state.task_scores)
        {
            let pools = curriculum.metrics(scores, self.prompts().len());
            metrics.policy.extend(pools);
        }
        state.skipped_steps += usize::from(metrics.skipped);
        self.models.refresh_reference(state.steps)?;
        self.state = state;
        metrics.seconds = collection.seconds;
        metrics.seconds.train = start.elapsed().as_secs_f64();
        self.last = Some(StepRollouts {
            step: metrics.step,
            groups: collection.all,
            advantages: means,
        });
        Ok(metrics)
    }

    /// Computes the batch of the groups to train on. If there is nothing to learn, returns the
    /// reason as well.
    fn prepare(
        &self,
        collection: &Collection,
        state: &mut TrainerState,
    ) -> Result<(Option<StepBatch>, Option<String>)> {
        let Some(kept) = collection.kept()? else {
            let groups = collection.all.rows.len();
            let reason = format!("all {groups} groups filtered (group_filter)");
            return Ok((None, Some(reason)));
        };
        let (models, config, estimator) = (&self.models, &*self.config, self.estimator.as_deref());
        let passes = passes(config, self.ranks(), &*self.progress);
        let device = models.actor.parameters().device();
        let mut batch = StepBatch::new(kept, config, device)?;
        let filtered = batch.why_filtered(config)?;
        if filtered.is_some() {
            return Ok((Some(batch), filtered));
        }
        // A step without a signal saves the other passes over the models.
        signals(&mut batch, self.needs.advantage, models, config, passes)?;
        advantages(&mut batch, estimator, config, state)?;
        if batch.has_no_signal(config)? {
            return Ok((Some(batch), Some("all advantages are 0".to_owned())));
        }
        signals(&mut batch, self.needs.all(), models, config, passes)?;
        Ok((Some(batch), None))
    }

    /// Collects the completions of the next step.
    fn collect(&mut self) -> Result<Collection> {
        self.collector.generator.release();
        let step = self.state.steps + 1;
        if self.config.rollout.max_staleness == 0 {
            let scores = self.state.task_scores.as_ref();
            let visited = self.state.visited;
            return self
                .collector
                .collect(step, visited, Some(&self.weights()), scores);
        }
        let mut ahead = match self.ahead.take() {
            Some(ahead) => ahead,
            None => self.start_ahead()?,
        };
        let scores = self.state.task_scores.as_ref();
        let collection = ahead.next(step, self.last_step, &self.weights(), scores)?;
        self.ahead = Some(ahead);
        Ok(collection)
    }

    /// Starts the thread that draws ahead.
    fn start_ahead(&self) -> Result<Ahead<C>> {
        let most = self.config.rollout.max_staleness;
        let mut collector = self.collector.clone();
        ensure!(
            self.ranks().is_alone()
                || self.config.recipe.group_filter.is_none()
                    && !self.needs.reads(Source::GreedyRollouts),
            "rollout.max_staleness: {most}, must be 0 on several ranks with a group filter or greedy baselines, for which the ranks exchange scores as they draw"
        );
        if self.draws_itself {
            let on_gpu = !self.models.actor.parameters().device().is_cpu();
            let rollout = &self.config.rollout;
            rollout
                .validate_local(on_gpu)
                .map_err(|error| within("rollout", error))?;
            let dtype = self.config.rollout_dtype();
            let generator = LocalGenerator::detached(&self.weights(), dtype)?;
            collector = collector.with_generator(Arc::new(generator));
        } else {
            ensure!(
                !collector.shares_weights(),
                "rollout.max_staleness: {most}, must be 0 with a generator that shares the weights of the policy"
            );
        }
        Ahead::start(collector, self.state.steps, self.state.visited)
    }

    /// Fails if the weights are those of half a step.
    fn ensure_whole(&self) -> Result<()> {
        ensure!(
            !self.torn,
            "step {}: failed after it had changed weights, resume from a checkpoint",
            self.state.steps + 1
        );
        Ok(())
    }

    /// The weights of the policy.
    fn weights(&self) -> PolicyWeights<'_, C> {
        // Every step that is not skipped changes weights.
        let version = self.state.steps - self.state.skipped_steps;
        self.models.weights(version as u64)
    }

    /// Returns a sampler of the policy, with the generator, the tokenizer and the progress of the
    /// trainer. Use it before the next step.
    ///
    /// If [`TrainConfig::rollout`] names an engine that receives no weights, the sampler draws from
    /// the policy in this process.
    ///
    /// If a custom generator draws completions of later steps, this waits for the end of its draw,
    /// and the next one begins in the next step.
    ///
    /// # Errors
    ///
    /// If `sampling` is not valid or the generator fails to take over the current weights.
    pub fn sampler(&self, sampling: SamplingConfig) -> Result<Sampler<C>> {
        match self.config.rollout.is_fixed_policy() {
            true => {
                let sampler = self.models.sampler(sampling)?;
                Ok(self.collector.attach(sampler))
            }
            false => self.collector.reserve(&self.weights(), sampling),
        }
    }

    /// Returns the completions of the last step, as many as `config` allows, whether or not it
    /// [is due](RolloutLogConfig::is_due); none before a step.
    ///
    /// # Errors
    ///
    /// If a completion cannot be decoded.
    pub fn rollouts(&self, config: &RolloutLogConfig) -> Result<Vec<RolloutRecord>> {
        match &self.last {
            Some(last) => {
                let sampling = &self.config.sampling;
                last.records(self.prompts(), sampling, self.tokenizer(), config)
            }
            None => Ok(Vec::new()),
        }
    }

    /// Returns the state of the run.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Checks the weights that train.
    ///
    /// # Errors
    ///
    /// [`NotFinite`](crate::NotFinite) if a weight of the policy, its adapters, their sum or the
    /// critic is NaN or infinite.
    pub fn ensure_finite(&self) -> Result<()> {
        self.models.ensure_finite()
    }

    /// Takes the digest of the initial weights from `inputs`, which belong to the same model.
    /// Otherwise checkpoints compute it again.
    pub fn with_inputs(self, inputs: &RunInputs) -> Self {
        self.models.set_inputs(inputs);
        self
    }

    /// Writes a checkpoint of a custom model into an existing folder, such as that of
    /// [`Checkpoints::write`](crate::run::Checkpoints::write): the current weights as
    /// `model.safetensors`, the configuration as `config.json`, the tokenizer as `tokenizer.json`,
    /// and [`Self::save_state`].
    ///
    /// # Errors
    ///
    /// If the model is a decoder, whose checkpoint is that of `write_checkpoint`, and
    /// [`NotFinite`](crate::NotFinite) before anything is written, if a weight is NaN or infinite.
    pub fn write_custom_checkpoint(&self, folder: &Path) -> Result<()> {
        self.models.write_custom(folder, self.tokenizer())?;
        self.save_state(folder)
    }

    /// Takes part in a checkpoint or [`Self::save_state`] of rank 0. With
    /// [`TrainConfig::sharded_optimizer`] all other ranks must call it meanwhile.
    pub fn take_part_in_checkpoint(&self) -> Result<()> {
        self.models.take_part_in_save()
    }

    /// Writes the state of the run except the weights of the policy, which
    /// [`Pretrained::write_files`] writes into the same folder: the state of trainer and
    /// optimizers, adapters in `adapter/`, the critic, and a reference that follows the policy.
    ///
    /// Custom advantage estimators, reward functions and generators must save their state
    /// themselves.
    pub fn save_state(&self, folder: &Path) -> Result<()> {
        self.ensure_whole()?;
        self.models.save(folder, &self.state, self.prompts())
    }

    /// Resumes from a checkpoint of `write_checkpoint`, or of a custom model. On the CPU the
    /// following steps are bit-identical to those of an uninterrupted run. The trainer must have
    /// the same model and configuration as the one that wrote the checkpoint.
    ///
    /// # Errors
    ///
    /// If shape, adapters, critic or the initial weights of adapters or reference differ, or the
    /// configuration of a custom model. The
    /// trainer must not be used after an error.
    pub fn load_state(&mut self, folder: &Path) -> Result<()> {
        let prompts = Arc::clone(&self.collector.prompts);
        self.state = self.models.load(folder, &self.state, &prompts)?;
        self.torn = false;
        self.ahead = None;
        self.last = None;
        self.collector.generator.lock().reset();
        Ok(())
    }

    /// Returns the current parameters of the policy, with merged adapters if there are any. Without
    /// adapters the parameters are shared with the policy.
    pub fn policy_parameters(&self) -> Result<Parameters> {
        self.weights().merged()
    }

    /// The policy.
    pub fn actor(&self) -> &Actor<C::Model> {
        &self.models.actor
    }

    /// The policy, for changes between steps.
    ///
    /// Completions that were drawn ahead are drawn again. A learning rate set here does not last:
    /// every step sets that of [`TrainConfig::schedule`].
    pub fn actor_mut(&mut self) -> &mut Actor<C::Model> {
        self.ahead = None;
        self.collector.generator.lock().reset();
        &mut self.models.actor
    }

    /// The critic, if there is one.
    pub fn critic(&self) -> Option<&Critic> {
        self.models.critic.as_ref()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.collector.tokenizer
    }

    /// The prompts to train on.
    pub fn prompts(&self) -> &[Prompt] {
        &self.collector.prompts
    }

    /// The reward function.
    pub fn reward(&self) -> &dyn RewardFunction {
        self.collector.reward.as_ref()
    }

    /// Ends a run: stops the thread that draws ahead, and calls [`RewardFunction::finish`].
    ///
    /// # Errors
    ///
    /// That of the reward function.
    pub fn finish(&mut self) -> Result<()> {
        self.ahead = None;
        self.reward().finish()
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The number of steps, including skipped ones.
    pub fn steps(&self) -> usize {
        self.state.steps
    }

    /// The number of steps without an update.
    pub fn skipped_steps(&self) -> usize {
        self.state.skipped_steps
    }
}

impl Trainer {
    /// Writes a checkpoint into an existing folder: `model` with the current weights of the policy,
    /// in the form of [`Pretrained::save`] and in `dtype`, and [`Self::save_state`]. Adapters are
    /// merged into the weights. Another dtype than f32 is for readers: if all weights train, they
    /// are also written in f32, from which the run resumes.
    ///
    /// # Errors
    ///
    /// [`NotFinite`](crate::NotFinite) before anything is written, if a weight is NaN or infinite.
    pub fn write_checkpoint(
        &self,
        folder: &Path,
        model: &Pretrained,
        dtype: ComputeDType,
    ) -> Result<()> {
        self.models.write_policy(folder, model, dtype)?;
        self.save_state(folder)
    }
}

/// The passes of a step.
fn passes<'a>(config: &TrainConfig, ranks: &'a Ranks, progress: &'a dyn Progress) -> Passes<'a> {
    Passes {
        progress,
        receiver: progress,
        ..Passes::new(config, ranks)
    }
}
