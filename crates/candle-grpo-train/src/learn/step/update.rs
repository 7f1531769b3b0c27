//! The optimizer steps of a step.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_grpo_core::MetricValues;
use candle_grpo_core::inputs::Input;
use candle_grpo_core::validate::{Name, check};
use candle_grpo_loss::surrogate::LossLevel;
use candle_grpo_loss::{Aggregation, PolicyBatch, StepTotals, TokenLoss};
use candle_grpo_nn::{LanguageModel, ModelConfig};

use super::{Passes, StepBatch, single};
use crate::learn::demonstrations::{Demonstrations, demonstration_metrics};
use crate::learn::micro_batches::{Divided, MicroBatchSize};
use crate::learn::models::Models;
use crate::learn::{LikelihoodSums, TrainerState, count_prompt_tokens, read_tokens};
use crate::random::{generator, uniform};
use crate::sequence::Batch;
use crate::{Actor, Critic, TrainConfig, TrainingBatch};
use candle_grpo_base::progress::{NoProgress, Phase};

/// The optimizer steps of a step.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Updates {
    /// Number of updates of the policy.
    pub updates: usize,
    /// Number of mini-batches without a token that trains.
    pub skipped_mini_batches: usize,
    /// Mean norm of the gradients of the policy; absent without an update.
    pub grad_norm: Option<f64>,
    /// The learning rate of the policy; absent without an update.
    pub learning_rate: Option<f64>,
    /// The metrics of rewards, advantages and losses by name.
    pub metrics: BTreeMap<String, f64>,
}

/// Updates policy and critic with all mini-batches of `batch`, once per epoch, and with
/// `demonstrations` if the settings give them a share. Without a batch the policy learns from these
/// alone.
///
/// A custom loop that has no [`TrainConfig::demonstrations`] passes `None`.
///
/// # Errors
///
/// If `batch` has no advantages or lacks an input of the loss, and with
/// [`NotFinite`](crate::NotFinite) if a loss or gradient is. With
/// [`Interrupted`](crate::Interrupted) if the progress of `passes` cancels before the first update.
pub fn update<C: ModelConfig>(
    batch: Option<&StepBatch>,
    models: &mut Models<C>,
    demonstrations: Option<&Demonstrations>,
    config: &TrainConfig,
    state: &mut TrainerState,
    passes: Passes<'_>,
) -> Result<Updates> {
    models.updated = false;
    let factor = config.schedule.factor(state.steps);
    models
        .actor
        .set_learning_rate(config.optimizer.learning_rate * factor);
    let share = demonstrations.map_or(0., |_| config.demonstration_share(state.steps));
    let demonstrations = demonstrations.filter(|_| share > 0.);
    let mut updater = Updater {
        models,
        config,
        state,
        passes,
        share,
        demonstrations,
        demonstrated: LikelihoodSums::default(),
        grad_norms: Vec::new(),
        found: Updates::default(),
    };
    let mut values = MetricValues::default();
    match batch {
        Some(batch) => {
            values = batch.metrics.clone();
            updater.learn(batch, factor, &mut values)?;
        }
        None => {
            let epochs = demonstrations.map_or(1, |found| found.epochs(config));
            updater.begin(0, 1, epochs);
            for _ in 0..epochs {
                let rows = updater.demonstrations_of((0, 1))?;
                updater.step_policy(rows)?;
            }
        }
    }
    Ok(updater.finish(&values))
}

struct Updater<'a, C: ModelConfig> {
    models: &'a mut Models<C>,
    config: &'a TrainConfig,
    state: &'a mut TrainerState,
    passes: Passes<'a>,
    /// The share of the demonstrations in the loss of the policy.
    share: f64,
    /// The demonstrations, if they have a share.
    demonstrations: Option<&'a Demonstrations>,
    demonstrated: LikelihoodSums,
    grad_norms: Vec<f64>,
    found: Updates,
}

impl<'a, C: ModelConfig> Updater<'a, C> {
    /// Begins to report the progress over `completions` and the demonstrations of each mini-batch.
    fn begin(&self, completions: usize, mini_batches: usize, epochs: usize) {
        let ranks = self.passes.ranks;
        let own = self.demonstrations.map_or(0, |found| {
            let parts = (0..mini_batches).map(|number| found.count((number, mini_batches)));
            parts.map(|rows| ranks.share(rows).len()).sum()
        });
        let units = (ranks.shares(true).share(completions).len() + own) * epochs;
        self.passes.receiver.begin(Phase::Learn, units);
    }

    fn learn(&mut self, batch: &StepBatch, factor: f64, values: &mut MetricValues) -> Result<()> {
        let training = batch.training_batch(self.models, self.config, self.passes)?;
        let trajectories = batch.trajectories_to_train(self.config, self.state)?;
        let mini_batch_size = self.config.mini_batch_size.unwrap_or(trajectories.len());
        let mini_batches = trajectories.chunks(mini_batch_size.max(1));
        let mini_batches = mini_batches.map(|part| MiniBatch::new(batch, &training, part));
        let mini_batches: Vec<MiniBatch> = mini_batches.collect::<Result<_>>()?;
        if let Some(controller) = &self.state.adaptive_entropy {
            self.models
                .actor
                .set_entropy_coef(controller.entropy_coef());
        }
        if let Some(critic) = &mut self.models.critic {
            critic.scale_learning_rate(factor);
        }
        let epochs = self.config.epochs;
        let sequences = mini_batches.iter().map(|part| part.groups.len()).sum();
        self.begin(sequences, mini_batches.len(), epochs);
        for _ in 0..epochs {
            for (number, mini_batch) in mini_batches.iter().enumerate() {
                let place = (number, mini_batches.len());
                self.learn_mini_batch(place, mini_batch, values)?;
            }
        }
        if let (Some(controller), Some(entropy)) =
            (&mut self.state.adaptive_entropy, values.get("entropy"))
        {
            controller.update(entropy)?;
        }
        Ok(())
    }

    fn learn_mini_batch(
        &mut self,
        place: (usize, usize),
        mini_batch: &MiniBatch,
        values: &mut MetricValues,
    ) -> Result<()> {
        let number = place.0 as u64;
        let seed = self.config.sampling.seed ^ ((self.state.steps as u64) << 32) ^ number;
        let Some((mini_batch, totals)) = self.complete(mini_batch, seed)? else {
            self.found.skipped_mini_batches += 1;
            return Ok(());
        };
        let ranks = self.passes.ranks;
        let divided = self.passes.divide(&mini_batch)?;
        if let Some(critic) = &mut self.models.critic {
            let passes = Passes {
                progress: &NoProgress,
                receiver: &NoProgress,
                ..self.passes
            };
            update_critic(critic, passes, (&mini_batch, &divided), &totals, values)?;
            self.models.updated = true;
        }
        if self.config.only_critic_trains(self.state.steps) {
            return Ok(());
        }
        let rows = self.demonstrations_of(place)?;
        if rows.is_none() && self.share == 1. {
            self.found.skipped_mini_batches += 1;
            return Ok(());
        }
        let read = read_tokens(mini_batch.tokens());
        let passes = self.passes_of_update();
        // The demonstrations sum the gradients, if there are any.
        let reduces = rows.is_none();
        let Models {
            actor, teachers, ..
        } = &mut *self.models;
        let distillation = self.config.distillation(teachers);
        let pass = |actor: &mut Actor<C::Model>, part: &TrainingBatch, _| {
            let mut part = part.clone();
            if let Some(distillation) = &distillation {
                distillation.complete(&mut part, passes.progress)?;
            }
            actor.forward_backward_of(&part, &totals, read)
        };
        let own = passes.accumulate(actor, (&mini_batch, &divided), reduces, pass)?;
        self.step_policy(rows)?;
        // After the reduction of the gradients, which is an operation of all ranks as well.
        for found in ranks.gather(own)?.concat() {
            values.merge(&found)?;
        }
        Ok(())
    }

    /// The passes of the next update. They do not cancel once the step has changed weights.
    fn passes_of_update(&self) -> Passes<'a> {
        Passes {
            progress: if self.models.updated {
                &NoProgress
            } else {
                self.passes.progress
            },
            ..self.passes
        }
    }

    /// The demonstrations in the update of mini-batch `number` of `count`, if it has any.
    fn demonstrations_of(&self, place: (usize, usize)) -> Result<Option<Batch>> {
        let visited = self.state.visited_demonstrations;
        let batch = self.demonstrations.map(|found| found.batch(visited, place));
        Ok(batch.transpose()?.flatten())
    }

    /// Adds the share of the gradient of demonstrations, the `rows`, to the rest of those of the
    /// completions, and makes an optimizer step. With rows, the gradients are summed over all
    /// ranks here, and otherwise by the last micro-batch before.
    fn step_policy(&mut self, rows: Option<Batch>) -> Result<()> {
        let ranks = self.passes.ranks;
        let passes = self.passes_of_update();
        let actor = &mut self.models.actor;
        if self.share > 0. {
            actor.scale_grad(1. - self.share)?;
        }
        let mut own = Vec::new();
        let demonstrations = self.demonstrations.zip(rows.as_ref());
        if let Some((demonstrations, rows)) = demonstrations {
            let passes = Passes {
                size: MicroBatchSize::TokensOfRows(demonstrations.config.micro_batch_tokens),
                ..passes
            };
            let divided = passes.divide(rows)?;
            let likelihood = demonstrations.likelihood();
            own = passes.accumulate_likelihood(actor, (rows, &divided), likelihood, self.share)?;
            self.state.visited_demonstrations += rows.sequences().len();
        }
        let stepped = actor.clip_grad_and_step(self.config.max_grad_norm);
        self.models.updated |= stepped.is_ok() || actor.optimizer().is_torn();
        let stats = stepped?;
        if demonstrations.is_some() {
            self.demonstrated
                .add(&LikelihoodSums::over_ranks(own, ranks)?);
        }
        self.grad_norms.push(stats.grad_norm);
        self.found.learning_rate = Some(stats.learning_rate);
        Ok(())
    }

    fn finish(mut self, values: &MetricValues) -> Updates {
        let updates = self.grad_norms.len();
        let mean = self.grad_norms.iter().sum::<f64>() / updates as f64;
        self.found.updates = updates;
        self.found.grad_norm = (updates > 0).then_some(mean);
        let finite = values.iter().filter(|(_, value)| value.is_finite());
        // JSON has no number for NaN and infinity.
        let metrics = finite.map(|(name, value)| (name.to_owned(), value));
        self.found.metrics = metrics.collect();
        if self.config.demonstrations.is_some() && updates > 0 {
            let metrics = demonstration_metrics(self.share, &self.demonstrated);
            self.found.metrics.extend(metrics);
        }
        self.found
    }

    /// Adds to a mini-batch everything that depends on all of it. Returns `None` if no token
    /// counts.
    fn complete(
        &self,
        mini_batch: &MiniBatch,
        seed: u64,
    ) -> Result<Option<(TrainingBatch, StepTotals)>> {
        let MiniBatch {
            inputs,
            groups,
            trajectories,
        } = mini_batch;
        let tokens = inputs.tokens();
        let sequences = Batch::new(tokens.sequences().to_vec())?;
        let sequences = sequences.with_trajectories(trajectories.clone())?;
        let mut totals = sequences.totals();
        if totals.tokens == 0. {
            return Ok(None);
        }
        let mut policy = inputs.policy().clone();
        let policy_loss = &self.config.recipe.policy_loss;
        let needs = policy_loss.needs();
        let is_branched = totals.rows < groups.len() as f64;
        if is_branched && policy_loss.aggregation == Aggregation::SeqMeanTokenMean {
            // The shares below are factors in this term, too.
            if let Some(own) = policy_loss.distillation.and_then(|term| term.aggregation) {
                check(
                    own == policy_loss.aggregation,
                    "recipe.policy_loss.distillation.aggregation",
                    Name(&own),
                    "be absent for trajectories with branches",
                )?;
            }
            let shares = Tensor::new(sequences.trajectory_shares(), tokens.targets().device())?;
            let shares = shares.unsqueeze(1)?.broadcast_as(tokens.dims())?;
            policy.token_weights = Some(match &policy.token_weights {
                Some(weights) => (weights * shares)?,
                None => shares.contiguous()?,
            });
        }
        if needs.contains(Input::PromptTokens) {
            let (counts, prompts) = count_prompt_tokens(tokens, groups)?;
            policy.prompt_tokens = Some(counts);
            totals.prompts = Some(prompts);
        }
        if policy_loss.surrogate.level() == LossLevel::Group {
            check(
                !is_branched,
                "recipe.policy_loss.surrogate",
                "compares the sequences of a group",
                "be another one for trajectories with branches",
            )?;
            let groups: Vec<f64> = groups.iter().map(|&group| group as f64).collect();
            policy.groups = Some(Tensor::new(groups, tokens.targets().device())?);
        }
        if let Some(entropy_mask) = &policy.entropy_mask {
            totals = totals.with_entropy_mask(entropy_mask)?;
        }
        if needs.contains(Input::SelectedTokens) {
            let actor = &self.models.actor;
            let passes = self.passes_of_update().over(actor.policy().divided());
            let log_probs = passes.map(tokens, |piece| actor.log_probs(piece))?;
            let current = policy.clone().log_probs(&log_probs);
            policy.selected_tokens = policy_loss.select_tokens(&current, seed)?;
        }
        let completed = inputs.clone().with_policy(|_| policy);
        Ok(Some((completed, totals)))
    }
}

impl StepBatch {
    /// The inputs of all updates.
    fn training_batch<C: ModelConfig>(
        &self,
        models: &Models<C>,
        config: &TrainConfig,
        passes: Passes<'_>,
    ) -> Result<TrainingBatch> {
        let advantages = self.advantages.as_ref();
        let advantages =
            advantages.context("advantages: absent, must be added before an update")?;
        let mut batch = TrainingBatch::new(self.tokens.clone(), advantages);
        batch.returns = self.returns.clone();
        if let Some(distillation) = config.distillation(&models.teachers) {
            batch.teachers = distillation.of_step(&self.tokens, passes)?;
        }
        // The update computes the entropy, with a gradient.
        let inputs = self.inputs.iter();
        let inputs = inputs.filter(|(input, _)| **input != Input::Entropy);
        let inputs = inputs.map(|(&input, tensor)| match tensor.rank() {
            1 => Ok((input, self.trajectories.split(tensor)?)),
            _ => Ok((input, tensor.clone())),
        });
        let inputs: Vec<(Input, Tensor)> = inputs.collect::<Result<_>>()?;
        let weights = self.sample_weights.as_ref();
        let weights = weights.map(|weights| self.trajectories.split(weights));
        let sample_weights = weights.transpose()?;
        let token_weights = self.token_weights.clone();
        Ok(batch.with_policy(|policy| {
            let inputs = inputs.iter();
            let policy = inputs.fold(policy, |policy, (input, tensor)| {
                policy.with(*input, tensor)
            });
            PolicyBatch {
                sample_weights,
                token_weights,
                ..policy
            }
        }))
    }

    /// The trajectories of all updates: those that [`TrainConfig::resampling`] draws if it is set.
    fn trajectories_to_train(
        &self,
        config: &TrainConfig,
        state: &TrainerState,
    ) -> Result<Vec<usize>> {
        let count = self.groups.rollouts.len();
        let Some(resampling) = &config.resampling else {
            return Ok((0..count).collect());
        };
        let places = self.groups.is_scored().enumerate();
        let places: Vec<usize> = places.filter_map(|(i, is)| is.then_some(i)).collect();
        let score = |&place: &usize| f64::from(self.groups.scores[place]);
        let scores: Vec<f64> = places.iter().map(score).collect();
        // No prompt has this index.
        let mut random = generator(config.sampling.seed, state.steps as u64, u64::MAX, 0);
        let uniforms: Vec<f64> = (0..count).map(|_| uniform(&mut random)).collect();
        let drawn = resampling.draw(&scores, &uniforms)?;
        Ok(drawn.into_iter().map(|i| places[i]).collect())
    }
}

/// The sequences of an optimizer step.
struct MiniBatch {
    inputs: TrainingBatch,
    /// The group of each sequence.
    groups: Vec<usize>,
    /// The trajectory of each sequence, numbered within the mini-batch. One that is there twice
    /// has two numbers.
    trajectories: Vec<usize>,
}

impl MiniBatch {
    /// The sequences of these trajectories.
    fn new(batch: &StepBatch, all: &TrainingBatch, drawn: &[usize]) -> Result<Self> {
        let (mut sequences, mut groups, mut trajectories) = (Vec::new(), Vec::new(), Vec::new());
        for (number, &trajectory) in drawn.iter().enumerate() {
            let own = &batch.trajectories.sequences()[trajectory];
            let group = trajectory / batch.groups.num_generations;
            groups.extend(own.iter().map(|_| group));
            trajectories.extend(own.iter().map(|_| number));
            sequences.extend(own);
        }
        Ok(Self {
            inputs: all.select(&sequences)?,
            groups,
            trajectories,
        })
    }
}

/// Runs one optimizer step of the critic.
fn update_critic(
    critic: &mut Critic,
    passes: Passes<'_>,
    divided: (&TrainingBatch, &Divided<TrainingBatch>),
    totals: &StepTotals,
    values: &mut MetricValues,
) -> Result<()> {
    let pass = |critic: &mut Critic, part: &TrainingBatch, _| critic.forward_backward(part, totals);
    let own = passes.accumulate(critic, divided, true, pass)?;
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
