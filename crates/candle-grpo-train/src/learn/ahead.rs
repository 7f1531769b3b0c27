//! Completions of later steps, drawn on another thread while the policy trains.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::Device;
use candle_grpo_core::selection::TaskScores;
use candle_grpo_core::validate::check;
use candle_grpo_nn::{ModelConfig, Parameters};

use super::collector::{Collect, Collection, Collector};
use super::snapshot::{NewestWeights, Snapshot};
use super::staleness::{max_staleness, stale_groups};
use super::{PhaseSeconds, TrainerState};
use crate::rollout::{LocalGenerator, PolicyWeights, UnfinishedGroup};
use candle_grpo_base::within;

/// Collects the completions of later steps on a thread while the policy trains.
pub(super) struct Ahead<C: ModelConfig> {
    collector: Collector<C>,
    /// True if the policy in this process draws the completions.
    draws_itself: bool,
    /// The last step for which completions are drawn.
    last_step: usize,
    /// The thread, from the first step on and unless it has failed.
    worker: Option<Worker<C>>,
}

impl<C: ModelConfig> Ahead<C> {
    pub(super) fn new(collector: Collector<C>, draws_itself: bool, last_step: usize) -> Self {
        Self {
            collector,
            draws_itself,
            last_step,
            worker: None,
        }
    }

    /// Starts the thread.
    fn start(&self, weights: &PolicyWeights<'_, C>, state: &TrainerState) -> Result<Worker<C>> {
        let mut collector = self.collector.clone();
        let config = Arc::clone(&collector.config);
        let most = config.rollout.max_staleness;
        check(
            collector.ranks().is_alone()
                || config.recipe.group_filter.is_none() && !collector.draws_greedy(),
            "rollout.max_staleness",
            most,
            "be 0 on several ranks with a group filter or greedy baselines, for which the ranks exchange scores as they draw",
        )?;
        if self.draws_itself {
            let on_gpu = !weights.parameters.device().is_cpu();
            let valid = config.rollout.validate_local(on_gpu);
            valid.map_err(|error| within("rollout", error))?;
            let dtype = config.rollout_dtype();
            let generator = if config.rollout.merge_adapters {
                LocalGenerator::merged(weights, dtype)
            } else {
                LocalGenerator::detached(weights, dtype)
            };
            collector = collector.with_generator(Arc::new(generator?));
        } else {
            check(
                !collector.shares_weights(),
                "rollout.max_staleness",
                most,
                "be 0 with a generator that shares the weights of the policy",
            )?;
        }
        Worker::start(collector, state)
    }
}

impl<C: ModelConfig> Collect<C> for Ahead<C> {
    fn collect(
        &mut self,
        weights: &PolicyWeights<'_, C>,
        state: &TrainerState,
    ) -> Result<Collection> {
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => self.start(weights, state)?,
        };
        let scores = state.task_scores.as_ref();
        let collection = worker.next(state.steps + 1, self.last_step, weights, scores)?;
        self.worker = Some(worker);
        Ok(collection)
    }

    fn discard(&mut self) {
        self.worker = None;
    }
}

/// A thread that collects the completions of steps in order, and its queues.
///
/// Step s is requested when step s - 1 - d has ended, with d = `max_staleness + 1 -
/// weight_sync_steps`, and drawn from the last weights that were synchronized until then. These
/// lack at most d + `weight_sync_steps` - 1 = `max_staleness` updates when step s trains. A
/// completion thus depends on the step, and not on the speed of the threads.
///
/// With in-flight updates, weights are passed on as soon as they are due, also while a step is
/// drawn. Its later tokens then lack fewer updates.
///
/// Dropping it cancels the draw and waits for the thread.
struct Worker<C: ModelConfig> {
    collector: Collector<C>,
    requests: Option<Sender<Request<C>>>,
    collections: Receiver<Result<Collection>>,
    thread: Option<JoinHandle<()>>,
    /// The last requested step.
    requested: usize,
    /// The version of the last weights that were passed to the thread.
    synchronized: Option<u64>,
    /// The weights that the thread takes while it draws, with in-flight updates.
    newest: Option<Arc<NewestWeights<C>>>,
    /// A copy in main memory of the frozen parameters of a policy with adapters on a GPU.
    base: Option<Parameters>,
}

struct Request<C> {
    step: usize,
    /// The weights for this step and those after it, if they are new.
    weights: Option<Snapshot<C>>,
    /// The scores of prompts for a curriculum, when the step is requested.
    scores: Option<TaskScores>,
}

impl<C: ModelConfig> Worker<C> {
    /// Starts the thread, for the steps after `state`.
    fn start(collector: Collector<C>, state: &TrainerState) -> Result<Self> {
        let (requests, requested) = channel();
        let (collected, collections) = channel();
        let in_flight = collector.config.rollout.in_flight_updates;
        let newest = in_flight.then(Arc::default);
        let own = Draws {
            collector: collector.clone().without_exchange(),
            newest: newest.clone(),
            visited: state.visited,
            unfinished_groups: state.unfinished_groups.clone(),
        };
        let thread = Builder::new()
            .name("rollouts".to_owned())
            .spawn(move || collect_all(own, &requested, &collected))
            .context("the thread of rollouts cannot be started")?;
        Ok(Self {
            collector,
            requests: Some(requests),
            collections,
            thread: Some(thread),
            requested: state.steps,
            synchronized: None,
            newest,
            base: None,
        })
    }

    /// Returns the completions of step `step`, the one after the last, for the policy `weights`.
    /// Requests those of the steps after it up to `last_step`. Draws groups again whose completions
    /// are too old. A curriculum draws the prompts of a step by the `scores` when it is requested.
    fn next(
        &mut self,
        step: usize,
        last_step: usize,
        weights: &PolicyWeights<'_, C>,
        scores: Option<&TaskScores>,
    ) -> Result<Collection> {
        let start = Instant::now();
        self.request(step, last_step, weights, scores)?;
        let Ok(collection) = self.collections.recv() else {
            bail!("{}", self.end_of_thread());
        };
        let mut collection = collection?;
        self.collector.exchange(&mut collection)?;
        let regenerated = self.regenerate(&mut collection, step, weights)?;
        collection.regenerated_groups = Some(regenerated);
        collection.seconds.wait = Some(start.elapsed().as_secs_f64());
        Ok(collection)
    }

    fn request(
        &mut self,
        step: usize,
        last_step: usize,
        weights: &PolicyWeights<'_, C>,
        scores: Option<&TaskScores>,
    ) -> Result<()> {
        let config = &self.collector.config.rollout;
        let every = config.weight_sync_steps;
        let ahead = (config.max_staleness + 1).saturating_sub(every);
        let last = (step + ahead).min(last_step).max(step);
        let is_due = self
            .synchronized
            .is_none_or(|version| weights.version.saturating_sub(version) >= every as u64);
        let mut new = None;
        if is_due && (self.newest.is_some() || self.requested < last) {
            new = Some(self.snapshot(weights)?);
            self.synchronized = Some(weights.version);
        }
        if let Some(newest) = &self.newest
            && let Some(weights) = new.take()
        {
            newest.put(weights);
        }
        while self.requested < last {
            let request = Request {
                step: self.requested + 1,
                weights: new.take(),
                scores: scores.cloned(),
            };
            self.requested += 1;
            // If the thread has ended, its last collection is the reason.
            if let Some(requests) = &self.requests {
                let _ = requests.send(request);
            }
        }
        Ok(())
    }

    fn snapshot(&mut self, weights: &PolicyWeights<'_, C>) -> Result<Snapshot<C>> {
        let base = match (&self.base, weights.adapters) {
            (Some(base), Some(_)) => Some(base.clone()),
            (None, Some(_)) => {
                let base = match weights.parameters.device() {
                    Device::Cpu => weights.parameters.clone(),
                    _ => weights.parameters.copy_to(&Device::Cpu)?,
                };
                self.base = Some(base.clone());
                Some(base)
            }
            (_, None) => None,
        };
        Snapshot::new(weights, base)
    }

    /// Draws the groups again that are older than the configuration allows. Returns their number.
    fn regenerate(
        &self,
        collection: &mut Collection,
        step: usize,
        weights: &PolicyWeights<'_, C>,
    ) -> Result<usize> {
        let most = self.collector.config.rollout.max_token_staleness();
        let version = weights.version;
        let stale = stale_groups(collection, version, most as u64)?;
        if stale.is_empty() {
            return Ok(0);
        }
        self.collector.resend(weights)?;
        self.collector.draw_again(collection, step, &stale)?;
        let of = if self.collector.config.rollout.partial {
            " (rollout.max_staleness + rollout.max_continuations)"
        } else {
            " (rollout.max_staleness)"
        };
        if let Some(&group) = stale_groups(collection, version, most as u64)?.first() {
            bail!(
                "generator: drew prompt {} with weights that lack {} updates, must be at most {most}{of}",
                self.collector.prompts[collection.all.rows[group]].index,
                max_staleness(&collection.all.group_batch(group)?, version)
            );
        }
        Ok(stale.len())
    }

    /// The reason why the thread has ended without a collection.
    fn end_of_thread(&mut self) -> anyhow::Error {
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => anyhow!("rollouts: {}", panic_message(&*panic)),
            _ => anyhow!("rollouts: the thread has ended"),
        }
    }
}

impl<C: ModelConfig> Drop for Worker<C> {
    fn drop(&mut self) {
        self.requests = None;
        self.collector.progress.set_stopped(true);
        self.collector.generator.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.collector.progress.set_stopped(false);
    }
}

/// The state of the thread.
struct Draws<C: ModelConfig> {
    collector: Collector<C>,
    newest: Option<Arc<NewestWeights<C>>>,
    /// The number of visited positions in the order of prompts.
    visited: usize,
    unfinished_groups: Vec<UnfinishedGroup>,
}

/// The thread: collects all requested steps, until one fails.
fn collect_all<C: ModelConfig>(
    mut draws: Draws<C>,
    requests: &Receiver<Request<C>>,
    collected: &Sender<Result<Collection>>,
) {
    let mut idle = Instant::now();
    while let Ok(request) = requests.recv() {
        let waited = idle.elapsed().as_secs_f64();
        let collection = draws.collect(request).map(|mut collection| {
            collection.seconds.idle = Some(waited);
            collection
        });
        idle = Instant::now();
        let failed = collection.is_err();
        if collected.send(collection).is_err() || failed {
            return;
        }
    }
}

impl<C: ModelConfig> Draws<C> {
    fn collect(&mut self, request: Request<C>) -> Result<Collection> {
        let newest = self.newest.as_deref();
        let weights = newest.and_then(NewestWeights::take).or(request.weights);
        let seconds = match &weights {
            Some(weights) => self.collector.receive(&weights.weights(), request.step)?,
            None => PhaseSeconds::default(),
        };
        drop(weights);
        let collection = self.collector.draw(
            request.step,
            self.visited,
            request.scores.as_ref(),
            std::mem::take(&mut self.unfinished_groups),
            (newest, seconds),
        )?;
        self.visited = collection.visited;
        self.unfinished_groups
            .clone_from(&collection.unfinished_groups);
        Ok(collection)
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    match message {
        Some(message) => format!("the thread panicked: {message}"),
        None => "the thread panicked".to_owned(),
    }
}
