//! The training loop.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_grpo_core::AdvantageEstimator;
use candle_grpo_nn::{DecoderConfig, Held, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use super::collector::{Collect, Collection, Collector};
use super::demonstrations::{DemonstrationSource, Demonstrations};
use super::distillation::Distillation;
use super::models::Models;
use super::needs::Needs;
use super::rollout_groups::{RolloutGroups, record};
use super::rollout_log::StepRollouts;
use super::staleness::staleness_metrics;
use super::step::{Passes, StepBatch, advantages, signals, update};
use super::teacher_samples::TeacherSamples;
use super::teachers::TeacherChoice;
use super::token_weights::TokenWeights;
use super::{Ranks, RolloutLogConfig, RolloutRecord, TrainerState};
use crate::environment::ensure_some_worked;
use crate::rollout::PolicyWeights;
use crate::{
    Actor, Critic, Progress, Prompt, RewardFunction, Rollout, Sampler, SamplingConfig, StepMetrics,
    TrainConfig,
};

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
    pub(super) models: Models<C>,
    pub(super) config: Arc<TrainConfig>,
    pub(super) needs: Needs,
    /// A custom estimator in place of the one in the recipe.
    pub(super) estimator: Option<Box<dyn AdvantageEstimator>>,
    /// The teacher of each completion.
    pub(super) teacher: Option<TeacherChoice>,
    /// True once the teachers have been checked.
    pub(super) teachers_answer: bool,
    pub(super) collector: Collector<C>,
    /// Collects the completions of steps with the collector.
    pub(super) source: Box<dyn Collect<C>>,
    /// The source of [`TrainConfig::demonstrations`].
    pub(super) demonstrations: Option<DemonstrationSource<C>>,
    /// The receiver of progress.
    pub(super) receiver: Arc<dyn Progress>,
    /// The progress of what runs within a step. One of several ranks cannot cancel alone.
    pub(super) progress: Arc<dyn Progress>,
    pub(super) state: TrainerState,
    /// The completions of the last step.
    pub(super) last: Option<StepRollouts>,
    /// True if a step failed after it had changed weights.
    pub(super) torn: bool,
}

/// The reason to skip a step without anything to learn from.
const NO_SAMPLE: &str =
    "no sample of the teacher reaches demonstrations.teacher_samples.min_reward";

impl<C: ModelConfig> Trainer<C> {
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

    /// Replaces the receiver of progress.
    pub fn set_progress(&mut self, receiver: Arc<dyn Progress>) {
        self.progress = self.ranks().progress_of_step(&receiver);
        let progress = Arc::clone(&self.progress);
        self.collector.progress.set_receiver(progress);
        if let Some(DemonstrationSource::Teacher(teacher)) = &self.demonstrations {
            teacher.set_progress(Arc::clone(&self.progress));
        }
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
    /// If all advantages are 0 and no other term has a signal, the loss has teachers alone and no
    /// completion has one, or the filters drop all completions, the step trains on the
    /// demonstrations alone. Without any the policy does not change, and the step counts as
    /// skipped. If the samples of a teacher are the whole loss, and there is no critic, no
    /// completion of the policy is drawn.
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
            self.source.discard();
            self.torn = self.models.updated;
            self.models.zero_grad();
        }
        result.with_context(|| format!("step {step}"))
    }

    /// Collects completions, prepares the batch, updates the models, and finally commits the state.
    fn try_step(&mut self) -> Result<StepMetrics> {
        self.ensure_not_canceled()?;
        self.last = None;
        let mut state = self.state.clone();
        state.steps += 1;
        if !self.teachers_answer {
            let loss = self.config.recipe.distillation_loss.as_ref();
            let entries = loss.and_then(Distillation::entries);
            for (_, teacher) in self.models.teachers.iter() {
                teacher.check(entries, &*self.progress)?;
            }
            self.teachers_answer = true;
        }
        self.collector.generator.release();
        let draws = !self.config.learns_from_teacher_samples_alone(state.steps);
        let held = self.hold_weights(draws && self.collector.holds_weights())?;
        let weights = self.models.weights(self.version());
        let mut collection = self.source.collect(&weights, &self.state)?;
        drop(held);
        state.visited = collection.visited;
        state.unfinished_groups = std::mem::take(&mut collection.unfinished_groups);
        let all = &collection.all;
        ensure_some_worked(all.rollouts.iter().map(Rollout::failure))?;
        if let Some(scores) = &mut state.task_scores {
            record(scores, all)?;
        }
        let mut metrics = StepMetrics::of_groups(state.steps, all)?;
        let samples = self.sample_teacher(&mut collection, state.steps)?;
        let all = &collection.all;
        let start = Instant::now();
        metrics.kept_groups = collection.kept.len();
        let (batch, reason) = if all.rows.is_empty() {
            (None, None)
        } else {
            self.prepare(&collection, &mut state)?
        };
        let mut means = vec![None; all.rollouts.len()];
        if let Some(batch) = &batch {
            let n = all.num_generations;
            let kept = batch.mean_advantages()?;
            for (&group, kept) in collection.kept.iter().zip(kept.chunks(n)) {
                means[group * n..(group + 1) * n].copy_from_slice(kept);
            }
        }
        let batch = batch.filter(|_| reason.is_none());
        let demonstrations = match (&self.demonstrations, &samples) {
            (Some(DemonstrationSource::Rows(rows)), _) => Some(rows),
            (_, samples) => samples.as_ref().map(|samples| &samples.demonstrations),
        };
        metrics.skip_reason = reason;
        let share = self.config.demonstration_share(state.steps);
        let teaches = |found: &Demonstrations| !found.is_empty() && share > 0.;
        metrics.skipped = batch.is_none() && !demonstrations.is_some_and(teaches);
        if metrics.skipped && metrics.skip_reason.is_none() {
            metrics.skip_reason = Some(NO_SAMPLE.to_owned());
        }
        if !metrics.skipped {
            let passes = passes(&self.config, self.collector.ranks(), &*self.progress)?;
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
        if let Some(samples) = samples {
            metrics.policy.extend(samples.metrics);
        }
        if self.config.rollout.trains_on_older_weights() {
            let version = self.version();
            metrics
                .policy
                .extend(staleness_metrics(&collection, version)?);
        }
        if self.config.rollout.partial {
            let unfinished = state.unfinished_groups.len() as f64;
            let name = "unfinished_groups".to_owned();
            metrics.policy.insert(name, unfinished);
        }
        let curriculum = self.collector.curriculum.as_ref();
        if let (Some(curriculum), Some(scores)) = (curriculum, &state.task_scores) {
            let pools = curriculum.metrics(scores, self.prompts().len());
            metrics.policy.extend(pools);
        }
        state.skipped_steps += usize::from(metrics.skipped);
        self.models.refresh_copies(state.steps)?;
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

    /// Lets the teacher sample the demonstrations of step `step` for its prompts, if it does and
    /// they have a share in the loss.
    fn sample_teacher(
        &self,
        collection: &mut Collection,
        step: usize,
    ) -> Result<Option<TeacherSamples>> {
        let Some(DemonstrationSource::Teacher(teacher)) = &self.demonstrations else {
            return Ok(None);
        };
        if self.config.demonstration_share(step) == 0. {
            return Ok(None);
        }
        let samples = teacher.draw(step, collection.prompts().to_vec())?;
        collection.seconds.add(&samples.seconds);
        Ok(Some(samples))
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
        let passes = passes(config, self.ranks(), &*self.progress)?;
        let device = models.actor.parameters().device();
        let mut batch = StepBatch::new(kept, config, device)?;
        if config.sample_weight_column.is_some() {
            let weights = self.sample_weights(batch.groups())?;
            batch = batch.with_sample_weights(Tensor::new(weights, device)?);
        }
        if let Some(weights) = TokenWeights::new(&config.token_weights)? {
            let weights = weights.of_batch(batch.tokens(), self.tokenizer(), device)?;
            batch = batch.with_token_weights(weights);
        }
        let filtered = batch.why_filtered(config)?;
        if filtered.is_some() {
            return Ok((Some(batch), filtered));
        }
        if let Some(teacher) = &self.teacher {
            let texts = (&config.sampling, self.tokenizer());
            let teachers = teacher.of_groups(batch.groups(), self.prompts(), texts)?;
            batch = batch.with_teachers(teachers)?;
        }
        // A step without a signal saves the other passes over the models.
        signals(&mut batch, self.needs.advantage, models, config, passes)?;
        advantages(&mut batch, estimator, config, state)?;
        if let Some(reason) = batch.why_no_signal(config)? {
            return Ok((Some(batch), Some(reason.to_owned())));
        }
        signals(&mut batch, self.needs.all(), models, config, passes)?;
        Ok((Some(batch), None))
    }

    /// The weights of the completions, whose mean is 1.
    fn sample_weights(&self, groups: &RolloutGroups) -> Result<Vec<f32>> {
        let prompts = &self.collector.prompts;
        let weight = |&row: &usize| self.config.sample_weight(&prompts[row].columns);
        let weights: Vec<f64> = groups.rows.iter().map(weight).collect::<Result<_>>()?;
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        let of_group = |weight| std::iter::repeat_n((weight / mean) as f32, groups.num_generations);
        Ok(weights.into_iter().flat_map(of_group).collect())
    }

    /// Fails if the weights are those of half a step.
    pub(super) fn ensure_whole(&self) -> Result<()> {
        ensure!(
            !self.torn,
            "step {}: failed after it had changed weights, resume from a checkpoint",
            self.state.steps + 1
        );
        Ok(())
    }

    /// Discards what was drawn with other weights than those that the policy has now.
    pub(super) fn discard_collected(&mut self) {
        self.source.discard();
        self.collector.generator.lock().reset();
    }

    /// The version of the weights: every step that is not skipped changes them.
    fn version(&self) -> u64 {
        (self.state.steps - self.state.skipped_steps) as u64
    }

    /// The weights of the policy.
    fn weights(&self) -> PolicyWeights<'_, C> {
        self.models.weights(self.version())
    }

    /// Returns a sampler of the policy, with the generator, the tokenizer and the progress of the
    /// trainer. Use it before the next step.
    ///
    /// If [`TrainConfig::rollout`] names an engine that receives no weights, the sampler draws from
    /// the policy in this process.
    ///
    /// With [`Sharding::Full`](candle_grpo_nn::optim::Sharding::Full), all ranks must call it
    /// together. The sampler and its clones hold all weights: drop them before the next step.
    ///
    /// If a custom generator draws completions of later steps, this waits for the end of its draw,
    /// and the next one begins in the next step.
    ///
    /// # Errors
    ///
    /// If `sampling` is not valid or the generator fails to take over the current weights.
    pub fn sampler(&self, sampling: SamplingConfig) -> Result<Sampler<C>> {
        let is_own = self.config.rollout.is_fixed_policy();
        let held = self.hold_weights(is_own || self.collector.holds_weights())?;
        let sampler = if self.config.rollout.is_fixed_policy() {
            let sampler = self.models.sampler(sampling)?;
            self.collector.attach(sampler)
        } else {
            self.collector.reserve(&self.weights(), sampling)?
        };
        Ok(sampler.holding(held))
    }

    /// Gathers all weights if ranks divide them and `holds` is true.
    fn hold_weights(&self, holds: bool) -> Result<Option<Held>> {
        if holds {
            self.models.actor.hold_weights()
        } else {
            Ok(None)
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

    /// Returns the current parameters of the policy, with merged adapters if there are any. Without
    /// adapters the parameters are shared with the policy. If ranks
    /// [divide](candle_grpo_nn::AdamWConfig::divide) the f32 weights, these are rounded; a
    /// checkpoint has the f32 weights. If they divide all weights, read them with
    /// [`Parameters::whole`], and [hold](Actor::hold_weights) them to merge adapters.
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
        self.discard_collected();
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
        self.source.discard();
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

/// The passes of a step.
fn passes<'a>(
    config: &TrainConfig,
    ranks: &'a Ranks,
    progress: &'a dyn Progress,
) -> Result<Passes<'a>> {
    Ok(Passes {
        progress,
        receiver: progress,
        ..Passes::new(config, ranks)?
    })
}
