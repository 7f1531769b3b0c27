//! The training step.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_grpo_core::{
    AdvantageEstimator, DynamicSampling, KlController, MetricValue, MetricValues, RunningMoments,
    SamplingDecision,
};
use candle_grpo_loss::{AdaptiveEntropy, Aggregation, StepTotals, Surrogate};
use candle_grpo_nn::{DecoderConfig, Lora, Parameters};
use tokenizers::Tokenizer;

use super::recipe_inputs::Requirements;
use super::scored_rollouts::ScoredRollouts;
use super::step_batch::Lesson;
use crate::rewards::score_rollouts;
use crate::rollout::decode::decode;
use crate::{
    Actor, Critic, Interrupted, NoProgress, Phase, PhaseSeconds, Progress, Prompt, Reference,
    RewardFunction, Sampler, SamplingConfig, ShuffledOrder, StepMetrics, TokenBatch, TrainConfig,
    TrainingBatch, prompt_tokens_to_host,
};

/// Trains a policy with rewards: sample, score, compare within groups, update.
pub struct Trainer {
    pub(crate) actor: Actor,
    pub(crate) reference: Option<Reference>,
    pub(crate) teacher: Option<Reference>,
    pub(crate) critic: Option<Critic>,
    pub(crate) estimator: Option<Box<dyn AdvantageEstimator>>,
    pub(crate) requirements: Requirements,
    pub(crate) config: TrainConfig,
    /// Of rewards, over the steps.
    pub(crate) running_moments: Option<RunningMoments>,
    pub(crate) reward_kl: Option<KlController>,
    sampler: Sampler,
    /// Draws the likeliest tokens, if scores are compared with those of greedy answers.
    greedy_sampler: Option<Sampler>,
    tokenizer: Tokenizer,
    prompts: Vec<Prompt>,
    order: ShuffledOrder,
    /// How many places of the order have been visited.
    pub(crate) visited: usize,
    reward: Box<dyn RewardFunction>,
    pub(crate) adaptive_entropy: Option<AdaptiveEntropy>,
    pub(crate) steps: usize,
    pub(crate) skipped_steps: usize,
    progress: Arc<dyn Progress>,
    /// Whether the step that is being made has changed weights, so that it must be made to its end.
    updated: bool,
    /// Whether a step failed after it had changed weights.
    pub(crate) torn: bool,
    /// Of the weights that the run began with, once it has been asked for.
    pub(crate) base_sha256: OnceCell<String>,
}

impl Trainer {
    /// A run that starts from `parameters`, of shape `model`.
    ///
    /// Errs if there are no prompts or `config` is not valid.
    pub fn new(
        model: DecoderConfig,
        parameters: Parameters,
        tokenizer: Tokenizer,
        prompts: Vec<Prompt>,
        reward: impl RewardFunction + 'static,
        config: TrainConfig,
    ) -> Result<Self> {
        config.validate()?;
        let actor = match config.adapters.clone() {
            None => Actor::new(model, parameters, config.actor())?,
            Some(adapters) => {
                let (seed, device) = (config.sampling.seed, parameters.device());
                let adapters = Lora::init(adapters, &model, seed, device).context("adapters")?;
                Actor::with_adapters(model, parameters, adapters, config.actor())?
            }
        };
        let requirements = Requirements::of(&config.recipe);
        let reference = match requirements.reference {
            true => Some(actor.reference()?),
            false => None,
        };
        let critic = match config.critic.clone() {
            Some(critic) => Some(Critic::new(actor.model(), actor.parameters(), critic)?),
            None => None,
        };
        let sampler = |sampling: SamplingConfig| -> Result<Sampler> {
            Ok(actor.sampler(sampling)?.with_tokenizer(&tokenizer))
        };
        let greedy_sampler = match requirements.greedy_scores {
            true => Some(sampler(SamplingConfig {
                greedy: true,
                ..config.sampling.clone()
            })?),
            false => None,
        };
        let running_moments = match config.recipe.reward_shaping.norm.is_running() {
            true => Some(RunningMoments::new(actor.parameters().device())?),
            false => None,
        };
        Ok(Self {
            sampler: sampler(config.sampling.clone())?,
            greedy_sampler,
            order: ShuffledOrder::new(prompts.len(), config.sampling.seed).context("prompts")?,
            visited: 0,
            reward: Box::new(reward),
            reward_kl: config.reward_kl,
            adaptive_entropy: config.adaptive_entropy,
            estimator: None,
            teacher: None,
            critic,
            steps: 0,
            skipped_steps: 0,
            progress: Arc::new(NoProgress),
            updated: false,
            torn: false,
            base_sha256: OnceCell::new(),
            actor,
            reference,
            requirements,
            running_moments,
            tokenizer,
            prompts,
            config,
        })
    }

    /// Takes advantages from `estimator`, one of your own, in place of the one in the recipe.
    ///
    /// It is given everything that the run has: rewards, groups, response mask, log-probs of the old policy (unless
    /// [`TrainConfig::old_log_probs`] is `Current`), and of reference and teacher if there are any.
    pub fn with_advantage_estimator(
        mut self,
        estimator: impl AdvantageEstimator + 'static,
    ) -> Self {
        self.estimator = Some(Box::new(estimator));
        self
    }

    /// The policy to learn from, for [`TokenShaping::distillation`](candle_grpo_core::TokenShaping::distillation). Its
    /// tokens must be those of the policy.
    pub fn with_teacher(mut self, teacher: Reference) -> Self {
        self.teacher = Some(teacher);
        self
    }

    /// With someone who follows the steps, and may stop them.
    pub fn with_progress(mut self, progress: Arc<dyn Progress>) -> Self {
        self.sampler = self.sampler.with_progress(Arc::clone(&progress));
        self.greedy_sampler = self
            .greedy_sampler
            .map(|sampler| sampler.with_progress(Arc::clone(&progress)));
        self.reward.set_progress(Arc::clone(&progress));
        self.progress = progress;
        self
    }

    /// Makes one step.
    ///
    /// If there is nothing to learn, because no advantage is other than 0 or no completion is left after the filters, the
    /// policy stays as it is, and the step is counted as skipped.
    ///
    /// After an error everything is as it was before the step. It errs with [`Interrupted`] if the progress says so before the first update;
    /// once weights have changed, the step is made to its end. It errs with [`NotFinite`](crate::NotFinite) rather than learn from a NaN
    /// or an infinity. If that comes after an earlier mini-batch of the step has changed weights, no further step can be made, and
    /// nothing be saved: there is a checkpoint to go back to.
    pub fn step(&mut self) -> Result<StepMetrics> {
        self.ensure_whole()?;
        let before = self.state()?;
        let step = self.steps + 1;
        self.steps = step;
        self.updated = false;
        let made = self.make_step();
        if made.is_err() {
            self.torn = self.updated;
            self.set_state(&before)?;
            self.actor.zero_grad();
            if let Some(critic) = &mut self.critic {
                critic.zero_grad();
            }
        }
        made.with_context(|| format!("step {step}"))
    }

    /// Errs if the weights are those of half a step.
    pub(crate) fn ensure_whole(&self) -> Result<()> {
        ensure!(
            !self.torn,
            "step {}: failed after it had changed weights, go back to a checkpoint",
            self.steps + 1
        );
        Ok(())
    }

    /// Errs if the step should stop and still can.
    fn ensure_wanted(&self) -> Result<()> {
        match !self.updated && self.progress.is_canceled() {
            true => Err(Interrupted.into()),
            false => Ok(()),
        }
    }

    fn make_step(&mut self) -> Result<StepMetrics> {
        let mut seconds = PhaseSeconds::default();
        let (all, kept) = self.sample_groups(&mut seconds)?;
        let mut metrics = StepMetrics::of_rollouts(
            self.steps,
            &all.rollouts,
            &all.scores,
            all.num_generations,
        );
        metrics.kept_groups = kept.len();

        let start = Instant::now();
        let mut figures = MetricValues::default();
        let lesson = match kept.is_empty() {
            true => None,
            false => self.lesson(&all.select(&kept)?, &mut figures)?,
        };
        match lesson {
            Some(lesson) => self.train(&lesson, figures, &mut metrics)?,
            None => {
                metrics.skipped = true;
                self.skipped_steps += 1;
            }
        }
        if let (Some(refresh), Some(reference)) =
            (self.config.reference_refresh, &mut self.reference)
            && self.steps.is_multiple_of(refresh.every_steps)
        {
            reference.refresh(self.actor.parameters(), refresh.alpha)?;
        }
        seconds.train = start.elapsed().as_secs_f64();
        metrics.seconds = seconds;
        Ok(metrics)
    }

    /// Samples until there are enough groups: all groups drawn, and the numbers of those that are trained on.
    fn sample_groups(
        &mut self,
        seconds: &mut PhaseSeconds,
    ) -> Result<(ScoredRollouts, Vec<usize>)> {
        let needed = self.config.prompts_per_step;
        let Some(filter) = self.config.recipe.group_filter else {
            let all = self.sample_batch(needed, 0, seconds)?;
            return Ok((all, (0..needed).collect()));
        };
        let sampling = DynamicSampling {
            groups: needed,
            max_batches: Some(self.config.max_sampling_batches),
            filter,
        };
        let mut all = self.sample_batch(needed, 0, seconds)?;
        let mut batches = 1;
        loop {
            let kept = sampling.keep(&all.groups()?);
            match sampling.decide(kept.len(), batches)? {
                SamplingDecision::Sample { missing } => {
                    all.extend(self.sample_batch(missing, batches, seconds)?)?;
                    batches += 1;
                }
                SamplingDecision::Train | SamplingDecision::GiveUp { .. } => {
                    return Ok((all, kept));
                }
            }
        }
    }

    /// The completions of the next `count` prompts, scored.
    fn sample_batch(
        &mut self,
        count: usize,
        batch: usize,
        seconds: &mut PhaseSeconds,
    ) -> Result<ScoredRollouts> {
        let num_generations = self.config.num_generations;
        let rows = self.order.slice(self.visited, count);
        self.visited += count;
        let prompts: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
        let start = Instant::now();
        // A prompt may come again in a later batch of the step, and must not get the same completions.
        let stream = self.steps as u64 | (batch as u64) << 32;
        self.progress.begin(Phase::Sample, count * num_generations);
        let rollouts = self.sampler.sample(&prompts, num_generations, stream)?;
        let sampled = Instant::now();
        self.progress.begin(Phase::Score, rollouts.len());
        let texts = decode(&rollouts, &self.tokenizer)?;
        let scores = score_rollouts(self.reward.as_ref(), &prompts, &rollouts, &texts)?;
        self.progress.advance(rollouts.len(), 0);
        self.ensure_wanted()?;
        seconds.sample += (sampled - start).as_secs_f64();
        seconds.score += sampled.elapsed().as_secs_f64();
        Ok(ScoredRollouts::new(num_generations, rows, rollouts, scores))
    }

    /// The score of a greedy answer to each of the prompts at `rows`.
    pub(crate) fn greedy_scores(&self, rows: &[usize]) -> Result<Option<Vec<f32>>> {
        let Some(sampler) = &self.greedy_sampler else {
            return Ok(None);
        };
        let prompts: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
        let rollouts = sampler.sample(&prompts, 1, 0)?;
        let texts = decode(&rollouts, &self.tokenizer)?;
        let scores = score_rollouts(self.reward.as_ref(), &prompts, &rollouts, &texts)?;
        Ok(Some(scores.total.into_vec()))
    }

    fn train(
        &mut self,
        lesson: &Lesson,
        mut figures: MetricValues,
        metrics: &mut StepMetrics,
    ) -> Result<()> {
        let completions = lesson.groups.len();
        let mini_batch_size = self.config.mini_batch_size.unwrap_or(completions);
        let mini_batches = lesson.batch.split(mini_batch_size)?;
        let groups: Vec<&[usize]> = lesson.groups.chunks(mini_batch_size).collect();
        let factor = self.config.schedule.factor(metrics.step);
        self.actor
            .set_learning_rate(self.config.optimizer.learning_rate * factor);
        if let Some(controller) = &self.adaptive_entropy {
            self.actor.set_entropy_coef(controller.entropy_coef());
        }
        if let Some(critic) = &mut self.critic {
            critic.scale_learning_rate(factor);
        }
        self.progress
            .begin(Phase::Learn, completions * self.config.epochs);
        let warm_up = self.config.critic.as_ref().map_or(0, |c| c.warmup_steps);
        let mut grad_norms = Vec::new();
        for _ in 0..self.config.epochs {
            for (number, (mini_batch, groups)) in mini_batches.iter().zip(&groups).enumerate() {
                let Some((mini_batch, totals)) =
                    self.whole_mini_batch(mini_batch, groups, number as u64)?
                else {
                    continue;
                };
                if let Some(critic) = &mut self.critic {
                    let size = self.config.micro_batch_size;
                    update_critic(critic, &mini_batch.split(size)?, &totals, &mut figures)?;
                    self.updated = true;
                }
                if metrics.step <= warm_up {
                    continue;
                }
                for micro_batch in mini_batch.split(self.config.micro_batch_size)? {
                    self.ensure_wanted()?;
                    figures.merge(&self.actor.forward_backward(&micro_batch, &totals)?)?;
                    let tokens = StepTotals::to_host(&micro_batch.tokens.response_mask)?.tokens;
                    self.progress
                        .advance(micro_batch.tokens.dims()?.0, tokens as usize);
                }
                self.ensure_wanted()?;
                let stats = self.actor.clip_grad_and_step(self.config.max_grad_norm)?;
                self.updated = true;
                grad_norms.push(stats.grad_norm);
                metrics.learning_rate = Some(stats.learning_rate);
            }
        }
        if let (Some(controller), Some(entropy)) =
            (&mut self.adaptive_entropy, figures.get("entropy"))
        {
            controller.update(entropy)?;
        }
        let mean = grad_norms.iter().sum::<f64>() / grad_norms.len() as f64;
        metrics.grad_norm = (!grad_norms.is_empty()).then_some(mean);
        metrics.policy = figures
            .iter()
            // No JSON number can be one that is not finite.
            .filter(|(_, value)| value.is_finite())
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        Ok(())
    }

    /// Mini-batch `number` of the step, whose sequences are of these `groups`, with what depends on all of it; nothing if
    /// none of its tokens counts.
    fn whole_mini_batch(
        &self,
        mini_batch: &TrainingBatch,
        groups: &[usize],
        number: u64,
    ) -> Result<Option<(TrainingBatch, StepTotals)>> {
        let mask = &mini_batch.tokens.response_mask;
        let mut totals = StepTotals::to_host(mask)?;
        if totals.tokens == 0. {
            return Ok(None);
        }
        let mut mini_batch = mini_batch.clone();
        let policy_loss = &self.config.recipe.policy_loss;
        if [
            Some(policy_loss.aggregation),
            policy_loss.entropy_aggregation,
        ]
        .contains(&Some(Aggregation::PromptMeanTokenMean))
        {
            let (tokens, prompts) =
                prompt_tokens_to_host(&mini_batch.tokens.response_mask, groups)?;
            mini_batch.prompt_tokens = Some(tokens);
            totals.prompts = prompts;
        }
        if matches!(
            policy_loss.surrogate,
            Surrogate::ClipCov(_) | Surrogate::KlCov(_)
        ) {
            let log_probs =
                self.in_pieces(&mini_batch.tokens, |piece| self.actor.log_probs(piece))?;
            let seed = self.config.sampling.seed ^ ((self.steps as u64) << 32) ^ number;
            let of_policy = mini_batch.policy_batch().with_log_probs(&log_probs);
            mini_batch.selected_tokens = policy_loss.select_tokens_to_host(&of_policy, seed)?;
        }
        Ok(Some((mini_batch, totals)))
    }

    /// What `of_tokens` gives `[B, T]`, computed in pieces of a micro-batch.
    pub(crate) fn in_pieces(
        &self,
        tokens: &TokenBatch,
        of_tokens: impl Fn(&TokenBatch) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (total, _) = tokens.dims()?;
        let size = self.config.micro_batch_size;
        let pieces = (0..total)
            .step_by(size)
            .map(|start| {
                self.ensure_wanted()?;
                of_tokens(&tokens.narrow(start, size.min(total - start))?)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&pieces, 0)?)
    }

    /// The policy.
    pub fn actor(&self) -> &Actor {
        &self.actor
    }

    /// The policy, to change it between steps.
    ///
    /// A learning rate set here does not last: every step sets the one that [`TrainConfig::schedule`] says.
    pub fn actor_mut(&mut self) -> &mut Actor {
        &mut self.actor
    }

    /// A sampler of the policy, which is watched as the steps are.
    pub fn sampler(&self, sampling: SamplingConfig) -> Result<Sampler> {
        let sampler = self.actor.sampler(sampling)?;
        Ok(sampler
            .with_tokenizer(&self.tokenizer)
            .with_progress(Arc::clone(&self.progress)))
    }

    /// The critic, if there is one.
    pub fn critic(&self) -> Option<&Critic> {
        self.critic.as_ref()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The reward function.
    pub fn reward(&self) -> &dyn RewardFunction {
        self.reward.as_ref()
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The number of steps made, the skipped ones included.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The number of steps that made no update.
    pub fn skipped_steps(&self) -> usize {
        self.skipped_steps
    }
}

/// One optimiser step of the critic.
fn update_critic(
    critic: &mut Critic,
    micro_batches: &[TrainingBatch],
    totals: &StepTotals,
    figures: &mut MetricValues,
) -> Result<()> {
    let mut loss = 0.;
    for micro_batch in micro_batches {
        let (share, of_loss) = critic.forward_backward(micro_batch, totals)?;
        loss += share;
        figures.merge(&of_loss)?;
    }
    let stats = critic.clip_grad_and_step()?;
    let mut of_step = MetricValues::default();
    for (name, sum) in [("value_loss", loss), ("value_grad_norm", stats.grad_norm)] {
        of_step.insert(name, MetricValue::Mean { sum, count: 1. });
    }
    Ok(figures.merge(&of_step)?)
}
