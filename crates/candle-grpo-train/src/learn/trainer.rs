//! The training loop.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_grpo_collective::Collective;
use candle_grpo_core::{
    AdvantageEstimator, DifficultyPools, MetricValues, RunningState, TaskScores,
};
use candle_grpo_loss::surrogate::LossLevel;
use candle_grpo_loss::{Aggregation, StepTotals, Surrogate, TokenLoss};
use candle_grpo_nn::{ComputeDType, DecoderConfig, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use super::ahead::Ahead;
use super::collector::{Collection, Collector};
use super::demonstrations::{Demonstrations, demonstration_metrics};
use super::distillation::Distillation;
use super::micro_batches::{MicroBatchSize, MicroBatches};
use super::models::Models;
use super::recipe_inputs::RecipeInputs;
use super::rollout_log::StepRollouts;
use super::scored_rollouts::ScoredRollouts;
use super::scored_rollouts::record;
use super::staleness::staleness_metrics;
use super::step_batch::{Preparation, PreparedStep, StepBatch, single};
use super::{LikelihoodSums, StepStats, Teacher, count_prompt_tokens};
use super::{RolloutLogConfig, RolloutRecord, TrainerState};
use crate::data::MixedOrder;
use crate::data::curriculum::Curriculum;
use crate::environment::{Environments, ensure_some_worked};
use crate::ranks::Ranks;
use crate::rollout::{LocalGenerator, PolicyWeights};
use crate::run::RunInputs;
use crate::sequence::response_forward::read_tokens;
use crate::{
    Actor, Critic, Generator, Pretrained, Progress, Prompt, RewardFunction, Rollout, Sampler,
    SamplingConfig, Sequence, StepMetrics, TrainConfig, TrainingBatch,
};
use candle_grpo_base::progress::{NoProgress, Phase};
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
    inputs: RecipeInputs,
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
    /// True if the current step has changed weights. Such a step can no longer be canceled.
    updated: bool,
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
        let inputs = RecipeInputs::new(&config.recipe);
        let models = Models::new(model, parameters, &config, inputs)?;
        let norm = &config.recipe.reward_shaping.norm;
        let state = TrainerState {
            steps: 0,
            skipped_steps: 0,
            visited: 0,
            visited_demonstrations: 0,
            running_moments: norm.is_running().then(RunningState::default),
            reward_kl: config.reward_kl,
            adaptive_entropy: config.adaptive_entropy,
            task_scores: None,
        };
        let sampler = models.sampler(config.sampling.clone())?;
        let config = Arc::new(config);
        let mut collector = Collector::new(
            sampler,
            tokenizer,
            prompts,
            reward,
            Arc::clone(&config),
            inputs,
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
            inputs,
            estimator: None,
            demonstrations: None,
            draws_itself: true,
            ahead: None,
            last_step: usize::MAX,
            receiver: Arc::new(NoProgress),
            progress: Arc::new(NoProgress),
            state,
            last: None,
            updated: false,
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
        self.updated = false;
        let result = self.try_step();
        if result.is_err() {
            self.ahead = None;
            self.torn = self.updated;
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
        let mut metrics = StepMetrics::from_rollouts(
            state.steps,
            &all.rollouts,
            &all.scores,
            all.num_generations,
        );
        metrics.reward_faults = all.faults();
        metrics.reward_requests = all.requests();
        metrics.rewards = all.reward_statistics();
        let mut advantages = vec![None; all.rollouts.len()];
        let start = Instant::now();
        metrics.kept_groups = collection.kept.len();
        if let Some(kept) = &collection.kept()? {
            let prepared = self.prepare(kept, state)?;
            state = prepared.state;
            let of_group = prepared.advantages.chunks(all.num_generations);
            for (&group, of_group) in collection.kept.iter().zip(of_group) {
                let first = group * all.num_generations;
                advantages[first..first + of_group.len()].copy_from_slice(of_group);
            }
            match &prepared.batch {
                Ok(batch) => self.update(batch, &mut state, prepared.metrics, &mut metrics)?,
                Err(reason) => metrics.skip_reason = Some(reason.clone()),
            }
        } else {
            let groups = metrics.sampled_groups;
            metrics.skip_reason = Some(format!("all {groups} groups filtered (group_filter)"));
        }
        metrics.skipped = metrics.skip_reason.is_some();
        if metrics.skipped && self.demonstration_share(&state) > 0. {
            self.update_from_demonstrations(&mut state, &mut metrics)?;
            metrics.skipped = false;
        }
        if self.config.rollout.max_staleness > 0 {
            let version = self.weights().version;
            metrics
                .policy
                .extend(staleness_metrics(&collection, version));
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
            scored: collection.all,
            advantages,
        });
        Ok(metrics)
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
                || self.config.recipe.group_filter.is_none() && !self.inputs.greedy_scores,
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

    /// Computes the batch of `scored`, without a change to the trainer.
    fn prepare(&self, scored: &ScoredRollouts, state: TrainerState) -> Result<PreparedStep> {
        let preparation = Preparation {
            models: &self.models,
            config: &self.config,
            inputs: self.inputs,
            estimator: self.estimator.as_deref(),
            micro_batches: self.micro_batches(),
            scored,
            state,
            metrics: MetricValues::default(),
        };
        preparation.prepare()
    }

    /// Updates the models with all mini-batches of `step`, once per epoch.
    fn update(
        &mut self,
        step: &StepBatch,
        state: &mut TrainerState,
        mut values: MetricValues,
        metrics: &mut StepMetrics,
    ) -> Result<()> {
        let completions = step.groups.len();
        let mini_batch_size = self.config.mini_batch_size.unwrap_or(completions);
        let mini_batches = step.batch.split(mini_batch_size)?;
        let groups: Vec<&[usize]> = step.groups.chunks(mini_batch_size).collect();
        let factor = self.begin_updates(state);
        let Models { actor, critic, .. } = &mut self.models;
        if let Some(controller) = &state.adaptive_entropy {
            actor.set_entropy_coef(controller.entropy_coef());
        }
        if let Some(critic) = critic {
            critic.scale_learning_rate(factor);
        }
        let share = self.demonstration_share(state);
        let completions = self.ranks().share(completions).len();
        let demonstrations = self.rank_demonstrations(share) * mini_batches.len();
        self.progress.begin(
            Phase::Learn,
            (completions + demonstrations) * self.config.epochs,
        );
        let mut demonstrated = LikelihoodSums::default();
        let mut grad_norms = Vec::new();
        for _ in 0..self.config.epochs {
            for (number, (mini_batch, groups)) in mini_batches.iter().zip(&groups).enumerate() {
                let seed = self.config.sampling.seed ^ ((state.steps as u64) << 32) ^ number as u64;
                let Some((mini_batch, totals)) =
                    self.complete_mini_batch(mini_batch, groups, seed)?
                else {
                    metrics.skipped_mini_batches += 1;
                    continue;
                };
                let (own, _) = self.micro_batches().divide(&mini_batch)?;
                if let Some(critic) = &mut self.models.critic {
                    let passes = MicroBatches {
                        progress: &NoProgress,
                        receiver: &NoProgress,
                        ranks: self.collector.ranks(),
                        size: self.config.micro_batches(),
                    };
                    update_critic(critic, passes, (&mini_batch, &own), &totals, &mut values)?;
                    self.updated = true;
                }
                if self.only_critic_trains(state) {
                    continue;
                }
                let read = match self.config.router_aux_loss_coef == 0. {
                    true => 0.,
                    false => read_tokens(mini_batch.tokens()),
                };
                let progress = cancelable(self.updated, &*self.progress);
                let passes = MicroBatches {
                    progress,
                    receiver: &*self.progress,
                    ranks: self.collector.ranks(),
                    size: self.config.micro_batches(),
                };
                let Models { actor, teacher, .. } = &mut self.models;
                let loss = self.config.recipe.distillation_loss.as_ref();
                let distillation = Distillation::new(loss, teacher.as_deref());
                // The demonstrations sum the gradients, if they have a share.
                let reduces = share == 0.;
                let pass = |actor: &mut Actor<C::Model>, part: &TrainingBatch, is_idle| {
                    let mut part = match is_idle {
                        true => part.without_work()?,
                        false => part.clone(),
                    };
                    if let Some(distillation) = &distillation {
                        distillation.complete(&mut part, progress)?;
                    }
                    actor.forward_backward_of(&part, &totals, read)
                };
                let own = passes.accumulate(actor, (&mini_batch, &own), reduces, pass)?;
                let (stats, sums) = self.step_policy(share, state)?;
                demonstrated.add(&sums);
                // After the reduction of the gradients, which is an operation of all ranks as well.
                for found in self.ranks().gather(own)?.concat() {
                    values.merge(&found)?;
                }
                grad_norms.push(stats.grad_norm);
                metrics.learning_rate = Some(stats.learning_rate);
            }
        }
        if let (Some(controller), Some(entropy)) =
            (&mut state.adaptive_entropy, values.get("entropy"))
        {
            controller.update(entropy)?;
        }
        let mean = grad_norms.iter().sum::<f64>() / grad_norms.len() as f64;
        metrics.grad_norm = (!grad_norms.is_empty()).then_some(mean);
        metrics.updates = grad_norms.len();
        metrics.policy = values
            .iter()
            // JSON has no number for NaN and infinity.
            .filter(|(_, value)| value.is_finite())
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        if self.demonstrations.is_some() && !grad_norms.is_empty() {
            metrics
                .policy
                .extend(demonstration_metrics(share, &demonstrated));
        }
        Ok(())
    }

    /// Updates the policy in a step without a signal of the rewards.
    fn update_from_demonstrations(
        &mut self,
        state: &mut TrainerState,
        metrics: &mut StepMetrics,
    ) -> Result<()> {
        let share = self.demonstration_share(state);
        self.begin_updates(state);
        self.progress
            .begin(Phase::Learn, self.rank_demonstrations(share));
        let (stats, sums) = self.step_policy(share, state)?;
        metrics.updates = 1;
        metrics.grad_norm = Some(stats.grad_norm);
        metrics.learning_rate = Some(stats.learning_rate);
        metrics.policy.extend(demonstration_metrics(share, &sums));
        Ok(())
    }

    /// Sets the learning rate of the policy. Returns the factor of the schedule.
    fn begin_updates(&mut self, state: &TrainerState) -> f64 {
        let factor = self.config.schedule.factor(state.steps);
        let learning_rate = self.config.optimizer.learning_rate * factor;
        self.models.actor.set_learning_rate(learning_rate);
        factor
    }

    /// Returns whether the step is one of the warm-up of the critic.
    fn only_critic_trains(&self, state: &TrainerState) -> bool {
        let critic = self.config.critic.as_ref();
        critic.is_some_and(|critic| state.steps <= critic.warmup_steps)
    }

    /// The share of the demonstrations in the loss of the policy.
    fn demonstration_share(&self, state: &TrainerState) -> f64 {
        match &self.demonstrations {
            Some(found) if !self.only_critic_trains(state) => found.config.coef.at(state.steps),
            _ => 0.,
        }
    }

    /// About the number of demonstrations of this rank in an update.
    fn rank_demonstrations(&self, share: f64) -> usize {
        match &self.demonstrations {
            Some(found) if share > 0. => self.ranks().share(found.config.batch_size).len(),
            _ => 0,
        }
    }

    /// Adds `share` times the gradient of the next demonstrations to `1 - share` times the
    /// gradients of the completions, and makes an optimizer step. With a share, the gradients are
    /// summed over all ranks here, and otherwise by the last micro-batch before.
    fn step_policy(
        &mut self,
        share: f64,
        state: &mut TrainerState,
    ) -> Result<(StepStats, LikelihoodSums)> {
        let ranks = self.collector.ranks();
        let mut own = Vec::new();
        if let Some(demonstrations) = &self.demonstrations
            && share > 0.
        {
            let rows = demonstrations.batch(state.visited_demonstrations)?;
            let passes = MicroBatches {
                size: MicroBatchSize::TokensOfRows(demonstrations.config.micro_batch_tokens),
                progress: cancelable(self.updated, &*self.progress),
                receiver: &*self.progress,
                ranks,
            };
            let (of_rank, _) = passes.divide(&rows)?;
            let actor = &mut self.models.actor;
            actor.scale_grad(1. - share)?;
            let likelihood = demonstrations.likelihood();
            own = passes.accumulate_likelihood(actor, (&rows, &of_rank), likelihood, share)?;
            state.visited_demonstrations += rows.sequences().len();
        }
        let max_norm = self.config.max_grad_norm;
        let stats = self.models.actor.clip_grad_and_step(max_norm)?;
        self.updated = true;
        let mut sums = LikelihoodSums::default();
        if share > 0. {
            sums = LikelihoodSums::over_ranks(own, ranks)?;
        }
        Ok((stats, sums))
    }

    /// Adds to a mini-batch, whose sequences belong to `groups`, everything that depends on all of
    /// it. Returns `None` if no token counts.
    fn complete_mini_batch(
        &self,
        mini_batch: &TrainingBatch,
        groups: &[usize],
        seed: u64,
    ) -> Result<Option<(TrainingBatch, StepTotals)>> {
        let tokens = mini_batch.tokens();
        let mut totals = tokens.totals();
        if totals.tokens == 0. {
            return Ok(None);
        }
        let mut policy = mini_batch.policy().clone();
        let policy_loss = &self.config.recipe.policy_loss;
        if [
            Some(policy_loss.aggregation),
            policy_loss.entropy_aggregation,
            policy_loss.distillation.and_then(|term| term.aggregation),
        ]
        .contains(&Some(Aggregation::PromptMeanTokenMean))
        {
            let (counts, prompts) = count_prompt_tokens(tokens, groups)?;
            policy.prompt_tokens = Some(counts);
            totals.prompts = Some(prompts);
        }
        if policy_loss.surrogate.level() == LossLevel::Group {
            let world_size = self.ranks().collective().world_size();
            ensure!(
                world_size == 1,
                "recipe.policy_loss.surrogate: compares the sequences of a group, must be another one with {world_size} processes, which share out sequences"
            );
            let groups: Vec<f64> = groups.iter().map(|&group| group as f64).collect();
            policy.groups = Some(Tensor::new(groups, tokens.targets().device())?);
        }
        if let Some(entropy_mask) = &policy.entropy_mask {
            totals = totals.with_entropy_mask(entropy_mask)?;
        }
        if matches!(
            policy_loss.surrogate,
            Surrogate::ClipCov(_) | Surrogate::KlCov(_)
        ) {
            let actor = &self.models.actor;
            let log_probs = self
                .micro_batches()
                .map(tokens, |piece| actor.log_probs(piece))?;
            let current = policy.clone().log_probs(&log_probs);
            policy.selected_tokens = policy_loss.select_tokens(&current, seed)?;
        }
        let completed = mini_batch.clone().with_policy(|_| policy);
        Ok(Some((completed, totals)))
    }

    fn micro_batches(&self) -> MicroBatches<'_> {
        MicroBatches {
            size: self.config.micro_batches(),
            progress: cancelable(self.updated, &*self.progress),
            receiver: &*self.progress,
            ranks: self.ranks(),
        }
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

/// The progress of a step, which does not cancel once the step has changed weights.
fn cancelable(updated: bool, progress: &dyn Progress) -> &dyn Progress {
    match updated {
        true => &NoProgress,
        false => progress,
    }
}

/// Runs one optimizer step of the critic.
fn update_critic(
    critic: &mut Critic,
    passes: MicroBatches<'_>,
    (mini_batch, own): (&TrainingBatch, &[TrainingBatch]),
    totals: &StepTotals,
    values: &mut MetricValues,
) -> Result<()> {
    let pass = |critic: &mut Critic, part: &TrainingBatch, is_idle| match is_idle {
        true => critic.forward_backward(&part.without_work()?, totals),
        false => critic.forward_backward(part, totals),
    };
    let own = passes.accumulate(critic, (mini_batch, own), true, pass)?;
    let ranks = passes.ranks;
    let stats = critic.clip_grad_and_step()?;
    let mut loss = 0.;
    for (share, metrics) in ranks.gather(own)?.concat() {
        loss += share;
        values.merge(&metrics)?;
    }
    let mut step_metrics = MetricValues::default();
    for (name, sum) in [("value_loss", loss), ("value_grad_norm", stats.grad_norm)] {
        step_metrics.insert(name, single(sum));
    }
    Ok(values.merge(&step_metrics)?)
}
