//! The completions of a step: drawn, scored and filtered.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_grpo_core::selection::{DynamicSampling, SamplingDecision, TaskScores};
use candle_grpo_nn::ModelConfig;
use tokenizers::Tokenizer;

use super::PhaseSeconds;
use super::TrainerState;
use super::collector_progress::CollectorProgress;
use super::generator_access::{GeneratorAccess, Turn};
use super::models::ensure_not_canceled;
use super::needs::{Needs, Source};
use super::rollout_groups::RolloutGroups;
use super::snapshot::{NewestWeights, Snapshot};
use super::step;
use crate::data::MixedOrder;
use crate::data::curriculum::Curriculum;
use crate::ranks::Ranks;
use crate::rollout::{PolicyWeights, Trajectories, UnfinishedGroup, WeightSync};
use crate::{Generator, Progress, Prompt, RewardFunction, Sampler, SamplingConfig, TrainConfig};
use candle_grpo_base::progress::Phase;

/// The source of the completions of the steps of a trainer.
pub(super) trait Collect<C: ModelConfig>: Send {
    /// Collects the completions of the step after `state` for the policy `weights`.
    fn collect(
        &mut self,
        weights: &PolicyWeights<'_, C>,
        state: &TrainerState,
    ) -> Result<Collection>;

    /// Discards the completions of later steps, and stops to draw them until the next call.
    fn discard(&mut self) {}
}

/// Draws the completions of a step when they are needed.
impl<C: ModelConfig> Collect<C> for Collector<C> {
    fn collect(
        &mut self,
        weights: &PolicyWeights<'_, C>,
        state: &TrainerState,
    ) -> Result<Collection> {
        let step = state.steps + 1;
        let scores = state.task_scores.as_ref();
        let groups = state.unfinished_groups.clone();
        let seconds = self.receive(weights, step)?;
        let mut collection = self.draw(step, state.visited, scores, groups, (None, seconds))?;
        let start = Instant::now();
        if self.sampler.takes_weights() {
            let mut turn = self.generator.lock();
            turn.sleep(&**self.sampler.generator(), &*self.progress)?;
        }
        collection.seconds.sample += start.elapsed().as_secs_f64();
        Ok(collection)
    }
}

/// Collects the completions of steps, on any thread. A clone shares generator, prompts and reward.
#[derive(Clone)]
pub(super) struct Collector<C: ModelConfig> {
    pub(super) config: Arc<TrainConfig>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) prompts: Arc<[Prompt]>,
    pub(super) reward: Arc<dyn RewardFunction>,
    pub(super) progress: Arc<CollectorProgress>,
    pub(super) generator: Arc<GeneratorAccess>,
    sampler: Sampler<C>,
    /// The order of the prompts.
    pub(super) order: MixedOrder,
    /// The choice of prompts by their scores, in place of the order.
    pub(super) curriculum: Option<Curriculum>,
    needs: Needs,
    /// True if the ranks exchange what they draw. On a thread of its own a collector has only the
    /// share of its rank, which [`Self::exchange`] completes.
    exchanges: bool,
}

/// The completions of a step with their scores.
#[derive(Debug)]
pub(super) struct Collection {
    /// All groups that were drawn; none if the step learns from a teacher's samples alone.
    pub(super) all: RolloutGroups,
    /// The rows of the prompts of a step without groups.
    undrawn: Vec<usize>,
    /// The numbers of the groups to train on.
    pub(super) kept: Vec<usize>,
    /// The score of the greedy completion of each kept group's prompt, if the advantages need it.
    greedy_scores: Option<Vec<f32>>,
    /// The number of visited positions in the order of prompts after the step.
    pub(super) visited: usize,
    /// The groups to continue in later steps.
    pub(super) unfinished_groups: Vec<UnfinishedGroup>,
    /// The number of groups that were drawn again because they were too old. Absent if nothing is
    /// drawn ahead.
    pub(super) regenerated_groups: Option<usize>,
    pub(super) seconds: PhaseSeconds,
}

impl<C: ModelConfig> Collector<C> {
    pub(super) fn new(
        sampler: Sampler<C>,
        tokenizer: Tokenizer,
        prompts: Vec<Prompt>,
        mut reward: Box<dyn RewardFunction>,
        config: Arc<TrainConfig>,
        needs: Needs,
    ) -> Result<Self> {
        let progress = Arc::new(CollectorProgress::new(config.rollout.max_staleness > 0));
        reward.set_progress(progress.clone());
        Ok(Self {
            sampler: sampler
                .with_tokenizer(&tokenizer)
                .with_experts(config.router_replay)
                .with_progress(progress.clone()),
            order: MixedOrder::single(prompts.len(), config.sampling.seed).context("prompts")?,
            config,
            tokenizer: Arc::new(tokenizer),
            prompts: prompts.into(),
            reward: reward.into(),
            progress,
            generator: Arc::default(),
            curriculum: None,
            needs,
            exchanges: true,
        })
    }

    /// Replaces the generator.
    pub(super) fn with_generator(self, generator: Arc<dyn Generator<C>>) -> Self {
        Self {
            sampler: self.sampler.with_generator(generator),
            generator: Arc::default(),
            ..self
        }
    }

    /// Returns a collector that draws from the `generator` of a teacher, with `sampling`.
    pub(super) fn of_teacher(
        &self,
        generator: Arc<dyn Generator<C>>,
        sampling: SamplingConfig,
    ) -> Result<Self> {
        // The thread that draws completions of later steps has the other one.
        let progress = Arc::new(CollectorProgress::new(false));
        let sampler = self.sampler.clone().with_config(sampling)?;
        let sampler = sampler.with_experts(false).with_progress(progress.clone());
        let own = Self {
            sampler,
            progress,
            ..self.clone()
        };
        Ok(own.with_generator(generator))
    }

    /// Draws trajectories with `environments`.
    pub(super) fn with_environments(self, environments: Arc<dyn Trajectories>) -> Self {
        Self {
            sampler: self.sampler.with_environments(environments),
            ..self
        }
    }

    /// Returns the next `count` prompts of a step that already has those of `drawn`.
    fn next_prompts(
        &self,
        scores: Option<&TaskScores>,
        visited: usize,
        count: usize,
        drawn: &[usize],
    ) -> Result<Vec<usize>> {
        match (&self.curriculum, scores) {
            (Some(curriculum), Some(scores)) => {
                curriculum.draw(scores, self.prompts.len(), visited, count, drawn)
            }
            _ => Ok(self.order.slice(visited, count)),
        }
    }

    /// Shares the work with other ranks.
    pub(super) fn with_ranks(self, ranks: Ranks) -> Self {
        Self {
            sampler: self.sampler.with_ranks(ranks),
            ..self
        }
    }

    /// The ranks that share the work.
    pub(super) fn ranks(&self) -> &Ranks {
        self.sampler.ranks()
    }

    /// Leaves the exchange between ranks to [`Self::exchange`], so that it can draw on any thread.
    pub(super) fn without_exchange(self) -> Self {
        Self {
            exchanges: false,
            ..self
        }
    }

    /// Completes a collection of [`Self::without_exchange`] with those of the other ranks.
    pub(super) fn exchange(&self, collection: &mut Collection) -> Result<()> {
        if !collection.undrawn.is_empty() {
            return Ok(());
        }
        let none = RolloutGroups::none(collection.all.num_generations);
        let own = std::mem::replace(&mut collection.all, none);
        collection.all = RolloutGroups::of_all_ranks(self.ranks().gather(own)?)?;
        Ok(())
    }

    /// Passes `weights` to the generator unless it has them or newer ones, or step `step` draws no
    /// completion of the policy. Returns how long it took.
    pub(super) fn receive(
        &self,
        weights: &PolicyWeights<'_, C>,
        step: usize,
    ) -> Result<PhaseSeconds> {
        if self.config.learns_from_teacher_samples_alone(step) {
            return Ok(PhaseSeconds::default());
        }
        let start = Instant::now();
        let mut turn = self.generator.wait(&*self.progress)?;
        self.pass(weights, &mut turn, &*self.progress)?;
        Ok(PhaseSeconds {
            sample: start.elapsed().as_secs_f64(),
            ..PhaseSeconds::default()
        })
    }

    fn pass(
        &self,
        weights: &PolicyWeights<'_, C>,
        turn: &mut Turn<'_>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let update =
            |turn: &mut Turn<'_>| turn.update(&**self.sampler.generator(), weights, progress);
        let parameters = weights.parameters;
        match (self.sampler.takes_weights(), parameters.needs_requests()) {
            (true, false) => update(turn),
            (true, true) => {
                parameters.begin_requests();
                let updated = update(turn);
                parameters.end_exports()?;
                updated
            }
            (false, true) => Ok(parameters.take_part_in_export()?),
            (false, false) => Ok(()),
        }
    }

    /// Passes `weights` to the generator, even if it has them.
    pub(super) fn resend(&self, weights: &PolicyWeights<'_, C>) -> Result<()> {
        let kept = self.kept(weights)?;
        let weights = kept.as_ref().map_or(*weights, Snapshot::weights);
        let mut turn = self.generator.wait(&*self.progress)?;
        turn.reset();
        self.pass(&weights, &mut turn, &*self.progress)
    }

    /// Copies weights that a generator may read again later, if the policy trains meanwhile.
    /// `None` if they stay as they are, or go to the generator as adapters.
    fn kept(&self, weights: &PolicyWeights<'_, C>) -> Result<Option<Snapshot<C>>> {
        let rollout = &self.config.rollout;
        let reads_again = match rollout.weight_sync {
            WeightSync::Nccl | WeightSync::Ipc => true,
            WeightSync::Auto => weights.adapters.is_none(),
            _ => false,
        };
        let is_ahead = rollout.max_staleness > 0 && !rollout.engine.is_local();
        (is_ahead && reads_again && self.sampler.takes_weights())
            .then(|| Snapshot::new(weights, None))
            .transpose()
    }

    /// Returns whether it draws greedy completions, too.
    pub(super) fn draws_greedy(&self) -> bool {
        self.needs.reads(Source::GreedyRollouts)
    }

    /// Returns true if the generator draws from the parameters of the policy themselves.
    pub(super) fn shares_weights(&self) -> bool {
        self.sampler.generator().shares_weights()
    }

    /// Returns whether all ranks must hold the weights that they divide while the generator
    /// samples. An engine of all ranks gets them from rank 0. It may get adapters again later,
    /// with the weights under them.
    pub(super) fn holds_weights(&self) -> bool {
        let rollout = &self.config.rollout;
        let is_served = self.sampler.generator().serves_all_ranks();
        !is_served || self.config.adapters.is_some() && !rollout.is_fixed_policy()
    }

    /// Returns `sampler` with the tokenizer and the ranks, and reporting its progress.
    pub(super) fn attach(&self, sampler: Sampler<C>) -> Sampler<C> {
        let sampler = sampler
            .with_tokenizer(&self.tokenizer)
            .with_ranks(self.ranks().clone())
            .with_progress(self.progress.receiver());
        match self.sampler.environments() {
            Some(environments) => sampler.with_environments(Arc::clone(environments)),
            None => sampler,
        }
    }

    /// Reserves the generator, passes `weights` to it, and returns its sampler with `sampling`,
    /// which reports its progress.
    pub(super) fn reserve(
        &self,
        weights: &PolicyWeights<'_, C>,
        sampling: SamplingConfig,
    ) -> Result<Sampler<C>> {
        let kept = self.kept(weights)?;
        let weights = kept.as_ref().map_or(*weights, Snapshot::weights);
        let mut turn = self.generator.reserve();
        let progress = self.progress.receiver();
        self.pass(&weights, &mut turn, &*progress)?;
        let sampler = self.sampler.clone().with_config(sampling)?;
        Ok(sampler.with_progress(progress))
    }

    /// Samples until step `step` has enough groups, from the
    /// prompts after the first `visited` positions of their order. A curriculum draws them by
    /// `scores`. With [`RolloutConfig::partial`](crate::rollout::RolloutConfig::partial), continues
    /// the groups of earlier steps. Passes the `newest` weights to the generator as soon as there
    /// are some, while it samples.
    pub(super) fn draw(
        &self,
        step: usize,
        mut visited: usize,
        scores: Option<&TaskScores>,
        mut unfinished_groups: Vec<UnfinishedGroup>,
        (newest, mut seconds): (Option<&NewestWeights<C>>, PhaseSeconds),
    ) -> Result<Collection> {
        let needed = self.config.prompts_per_step;
        if self.config.learns_from_teacher_samples_alone(step) {
            return Ok(Collection {
                all: RolloutGroups::none(self.config.num_generations),
                undrawn: self.next_prompts(scores, visited, needed, &[])?,
                kept: Vec::new(),
                greedy_scores: None,
                visited: visited + needed,
                unfinished_groups,
                regenerated_groups: None,
                seconds,
            });
        }
        // The sampling round of each group.
        let mut round_of = Vec::new();
        let mut drawn: Vec<usize> = unfinished_groups.iter().map(|group| group.row).collect();
        let mut sample = |count: usize, round: usize| {
            round_of.resize(round_of.len() + count, round);
            let new = match round {
                0 => self.config.prompts_in_flight(),
                _ => count,
            };
            let new = new.saturating_sub(unfinished_groups.len());
            let rows = self.next_prompts(scores, visited, new, &drawn)?;
            visited += new;
            drawn.extend_from_slice(&rows);
            if self.config.rollout.continues_completions() {
                let groups = &mut unfinished_groups;
                self.continue_groups(groups, newest, (rows, count), (step, round), &mut seconds)
            } else {
                self.sample_groups(rows, step, round, &mut seconds)
            }
        };
        let mut all = sample(needed, 0)?;
        let kept: Vec<usize> = match self.config.recipe.group_filter {
            None => (0..needed).collect(),
            Some(filter) => {
                let sampling = DynamicSampling {
                    groups: needed,
                    max_batches: Some(self.config.max_sampling_batches),
                    filter,
                };
                let mut rounds = 1;
                loop {
                    let kept = sampling.keep(&all.groups()?);
                    match sampling.decide(kept.len(), rounds)? {
                        SamplingDecision::Sample { missing } => {
                            all.extend(sample(missing, rounds)?)?;
                            rounds += 1;
                        }
                        SamplingDecision::Train | SamplingDecision::GiveUp { .. } => break kept,
                    }
                }
            }
        };
        let greedy_scores = if self.draws_greedy() && !kept.is_empty() {
            let mut scores = Vec::with_capacity(kept.len());
            for kept in kept.chunk_by(|&a, &b| round_of[a] == round_of[b]) {
                let rows = kept.iter().map(|&group| all.rows[group]).collect();
                let round = round_of[kept[0]];
                let greedy = self.score_greedy(rows, step, round, &mut seconds)?;
                all.add_requests(&greedy);
                scores.extend(greedy.scores);
            }
            Some(scores)
        } else {
            None
        };
        Ok(Collection {
            all,
            undrawn: Vec::new(),
            kept,
            greedy_scores,
            visited,
            unfinished_groups,
            regenerated_groups: None,
            seconds,
        })
    }

    /// Draws and scores these groups of step `step` again.
    pub(super) fn draw_again(
        &self,
        collection: &mut Collection,
        step: usize,
        groups: &[usize],
    ) -> Result<()> {
        let rows = groups.iter().map(|&group| collection.all.rows[group]);
        // The numbers of the other rounds are smaller.
        let round = self.config.max_sampling_batches;
        let drawn = self.sample_groups(rows.collect(), step, round, &mut collection.seconds)?;
        collection.all.replace(groups, drawn)
    }

    /// Starts groups for the prompts at `rows` in a sampling round of a step, and continues them
    /// and `groups` until `count` are whole. Scores these, and leaves the others in `groups`.
    fn continue_groups(
        &self,
        groups: &mut Vec<UnfinishedGroup>,
        newest: Option<&NewestWeights<C>>,
        (rows, count): (Vec<usize>, usize),
        (step, round): (usize, usize),
        seconds: &mut PhaseSeconds,
    ) -> Result<RolloutGroups> {
        let (prompts, num_generations) = (&self.prompts, self.config.num_generations);
        let at = (step, stream(step, round));
        let started = self
            .sampler
            .start_groups(prompts, &rows, num_generations, at);
        groups.extend(started);
        let oldest = step.saturating_sub(self.config.rollout.max_continuations);
        let units = groups.iter().map(UnfinishedGroup::count_left).sum();
        self.draw_and_score(&self.config.sampling, units, seconds, |turn| {
            let have_arrived = || newest.is_some_and(NewestWeights::have_arrived);
            let continue_groups = |groups: &mut Vec<UnfinishedGroup>| {
                let sampler = &self.sampler;
                sampler.continue_groups(prompts, groups, count, oldest, &have_arrived)
            };
            loop {
                if let Some(weights) = newest.and_then(NewestWeights::take) {
                    self.pass(&weights.weights(), turn, &*self.progress)?;
                }
                if continue_groups(groups)? {
                    break;
                }
            }
            let mut drawn = RolloutGroups::none(num_generations);
            let mut rows = Vec::with_capacity(count);
            let whole = groups.extract_if(.., |group| {
                let takes = drawn.rows.len() < count && group.count_left() == 0;
                if takes {
                    drawn.rows.push(drawn.rows.len());
                }
                takes
            });
            for group in whole.collect::<Vec<_>>() {
                let prompt = &prompts[group.row];
                rows.push(group.row);
                drawn.rollouts.extend(group.into_rollouts(prompt));
            }
            Ok((drawn, rows))
        })
    }

    /// Draws and scores the groups of the prompts at `rows` in a sampling round of a step.
    fn sample_groups(
        &self,
        rows: Vec<usize>,
        step: usize,
        round: usize,
        seconds: &mut PhaseSeconds,
    ) -> Result<RolloutGroups> {
        self.draw_rows(
            &self.sampler,
            rows,
            self.config.num_generations,
            stream(step, round),
            seconds,
        )
    }

    /// The score of the greedy completion of each of the prompts at `rows`. Environments start as
    /// those of the groups of the same step and round.
    fn score_greedy(
        &self,
        rows: Vec<usize>,
        step: usize,
        round: usize,
        seconds: &mut PhaseSeconds,
    ) -> Result<RolloutGroups> {
        let sampler = self.sampler.clone().with_config(SamplingConfig {
            greedy: true,
            ..self.config.sampling.clone()
        })?;
        self.draw_rows(&sampler, rows, 1, stream(step, round), seconds)
    }

    /// Draws and scores `count` completions for each of the prompts at `rows` in step `step`, with
    /// a collector of a teacher.
    pub(super) fn draw_of_teacher(
        &self,
        step: usize,
        rows: Vec<usize>,
        count: usize,
        seconds: &mut PhaseSeconds,
    ) -> Result<RolloutGroups> {
        // Those of the policy have smaller numbers, so a teacher with its weights draws others.
        let round = self.config.max_sampling_batches + 1;
        self.draw_rows(&self.sampler, rows, count, stream(step, round), seconds)
    }

    fn draw_rows(
        &self,
        sampler: &Sampler<C>,
        rows: Vec<usize>,
        num_generations: usize,
        stream: u64,
        seconds: &mut PhaseSeconds,
    ) -> Result<RolloutGroups> {
        let units = sampler.share(rows.len()).len() * num_generations;
        let mut own = RolloutGroups::none(num_generations);
        if units > 0 {
            own = self.draw_and_score(sampler.config(), units, seconds, |_| {
                let prompts: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
                let drawn = step::collect(sampler, &prompts, num_generations, stream)?;
                Ok((drawn, rows))
            })?;
        }
        if self.exchanges {
            RolloutGroups::of_all_ranks(sampler.ranks().gather(own)?)
        } else {
            Ok(own)
        }
    }

    /// Samples with `sample`, which reports the progress of `units` completions, and scores them.
    /// `sample` also returns the rows that its groups name by their numbers.
    fn draw_and_score(
        &self,
        sampling: &SamplingConfig,
        units: usize,
        seconds: &mut PhaseSeconds,
        sample: impl FnOnce(&mut Turn<'_>) -> Result<(RolloutGroups, Vec<usize>)>,
    ) -> Result<RolloutGroups> {
        let mut turn = self.generator.wait(&*self.progress)?;
        let start = Instant::now();
        self.progress.begin(Phase::Sample, units);
        let (mut groups, rows) = sample(&mut turn)?;
        drop(turn);
        let sampled = Instant::now();
        let units = groups.rollouts.len();
        self.progress.begin(Phase::Score, units);
        let prompts: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
        step::score(
            &mut groups,
            &prompts,
            &*self.reward,
            sampling,
            &self.tokenizer,
        )?;
        self.progress.advance(units, 0);
        ensure_not_canceled(&*self.progress)?;
        seconds.sample += (sampled - start).as_secs_f64();
        seconds.score += sampled.elapsed().as_secs_f64();
        groups.rows.iter_mut().for_each(|row| *row = rows[*row]);
        Ok(groups)
    }
}

impl Collection {
    /// The rows of the step's prompts.
    pub(super) fn prompts(&self) -> &[usize] {
        if self.undrawn.is_empty() {
            &self.all.rows
        } else {
            &self.undrawn
        }
    }

    /// The groups to train on, if there are any.
    pub(super) fn kept(&self) -> Result<Option<RolloutGroups>> {
        if self.kept.is_empty() {
            return Ok(None);
        }
        let kept = self.all.select(&self.kept)?;
        Ok(Some(RolloutGroups {
            greedy_scores: self.greedy_scores.clone(),
            ..kept
        }))
    }
}

/// The stream of random numbers of a sampling round. A prompt may occur again in a later round of
/// the step, with other completions.
fn stream(step: usize, round: usize) -> u64 {
    step as u64 | (round as u64) << 32
}
