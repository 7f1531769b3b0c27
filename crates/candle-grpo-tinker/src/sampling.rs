//! Samples from saved weights.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use candle_grpo_base::atomic_file;
use candle_grpo_base::progress::{Interrupted, Progress};
use candle_grpo_nn::{Decoder, Lora};
use candle_grpo_train::learn::Reference;
use candle_grpo_train::rollout::{
    AdapterEngine, Completion, CompletionSeed, Deliver, FinishReason, GenerationBatch,
    LocalGenerator, PolicyWeights, PromptRequest,
};
use candle_grpo_train::{Generator, SamplingConfig, TokenBatch};

use crate::base::Base;
use crate::config::TinkerConfig;
use crate::queue::{Queues, SampleRequest, SampleTurn, Turn, TurnLimits, Turns};
use crate::store::{SamplerRecord, WeightsPath};
use crate::work::{Outcome, SampledTokens};

/// A request for samples.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampleWork {
    pub(crate) weights: SamplerRecord,
    pub(crate) prompt: Vec<u32>,
    pub(crate) num_samples: usize,
    pub(crate) seed: u64,
    pub(crate) max_new_tokens: usize,
    /// Number of last prompt tokens that get log-probs.
    pub(crate) prompt_log_probs: Option<usize>,
    /// Distribution and ends. Requests with equal ones share a batch.
    pub(crate) sampling: SamplingConfig,
}

/// Draws samples, in this process or by an engine.
pub(crate) struct Sampler {
    base: Arc<Base>,
    queues: Arc<Queues>,
    /// Weights in memory, those that were used last at the end. They are dropped before the
    /// engine.
    slots: Mutex<Vec<(SamplerRecord, Slot)>>,
    engine: Option<Arc<dyn AdapterEngine>>,
    max_batch_size: usize,
    max_loaded_models: usize,
    /// Held during a pass that computes log-probs, so that memory is for one at a time.
    scoring: Mutex<()>,
}

/// Weights that one thread loads, while others that need them wait.
type Slot = Arc<Mutex<Option<Arc<Snapshot>>>>;

/// Weights to sample from: the base model, or with adapters.
struct Snapshot {
    source: Source,
    policy: Reference,
}

enum Source {
    Local(Box<LocalGenerator>),
    Engine(Box<dyn Generator>),
}

/// Cancels a turn that is in vain.
struct UntilOver<'a> {
    queues: &'a Queues,
    turn: &'a SampleTurn,
}

impl Progress for UntilOver<'_> {
    fn is_canceled(&self) -> bool {
        self.queues.is_over(self.turn)
    }
}

impl Sampler {
    pub(crate) fn new(
        base: Arc<Base>,
        queues: Arc<Queues>,
        engine: Option<Arc<dyn AdapterEngine>>,
        config: &TinkerConfig,
    ) -> Result<Self> {
        if engine.is_some() {
            // The base model is sampled from with adapters that change nothing.
            let (folder, name) = (queues.store().identity(), &base.info.name);
            let adapters = base.info.identity()?;
            atomic_file::write_folder(&folder, |folder| adapters.save(folder, Some(name)))?;
        }
        Ok(Self {
            base,
            queues,
            slots: Mutex::default(),
            engine,
            max_batch_size: config.max_batch_size,
            max_loaded_models: config.max_loaded_models,
            scoring: Mutex::default(),
        })
    }

    /// Returns the number of threads that run [`Self::run`]. Without an engine, there are none: the
    /// thread that trains also samples.
    pub(crate) fn num_threads(&self) -> usize {
        match self.engine {
            Some(_) => self.max_batch_size,
            None => 0,
        }
    }

    /// Draws samples until the queues stop. Each request has its own turn, because an engine makes
    /// its own batches.
    pub(crate) fn run(&self) {
        let limits = TurnLimits {
            samples: 1,
            weights: 1,
            tokens: 0,
        };
        while let Some(turn) = self.queues.next_turn(limits, Turns::Samples) {
            if let Turn::Sample(turn) = turn {
                self.sample(turn);
            }
        }
    }

    /// Draws samples, and publishes them.
    pub(crate) fn sample(&self, mut turn: SampleTurn) {
        let message = match self.draw(&turn) {
            Ok(()) => return,
            // Nobody waits, or clients send the requests again to the next server.
            Err(error) if error.is::<Interrupted>() => return,
            Err(error) => format!("{error:#}"),
        };
        if turn.weights().len() > 1 {
            // Alone, only those that cause it fail.
            tracing::info!("a shared batch fails, each of its weights has its own: {message}");
            self.queues.keep_pending(&mut turn);
            turn.by_weights()
                .into_iter()
                .for_each(|turn| self.sample(turn));
            return;
        }
        tracing::warn!("sampling: {message}");
        self.queues.fail_samples(&turn, &message);
    }

    /// Drops weights from memory, because others were saved at their path.
    pub(crate) fn forget(&self, path: &WeightsPath) {
        self.slots().retain(|(record, _)| !record.has(path));
    }

    fn slots(&self) -> MutexGuard<'_, Vec<(SamplerRecord, Slot)>> {
        // No code panics while it holds the lock.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the place for weights. Others that were unused longest make room.
    fn slot(&self, record: &SamplerRecord) -> Slot {
        let mut slots = self.slots();
        let found = slots.iter().position(|(other, _)| other == record);
        let slot = found.map(|at| slots.remove(at).1).unwrap_or_default();
        let over = (slots.len() + 1).saturating_sub(self.max_loaded_models);
        let dropped: Vec<_> = slots.drain(..over).collect();
        slots.push((record.clone(), Arc::clone(&slot)));
        drop(slots);
        drop(dropped);
        slot
    }

    /// Returns weights to sample from. If they are not in memory, the first thread loads them.
    fn snapshot(&self, record: &SamplerRecord, progress: &dyn Progress) -> Result<Arc<Snapshot>> {
        let slot = self.slot(record);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = &*slot {
            return Ok(Arc::clone(snapshot));
        }
        let snapshot = Arc::new(self.load(record, progress)?);
        *slot = Some(Arc::clone(&snapshot));
        Ok(snapshot)
    }

    fn load(&self, record: &SamplerRecord, progress: &dyn Progress) -> Result<Snapshot> {
        let (model, parameters) = (&self.base.info.model, &self.base.parameters);
        let folder = match &record.model_path {
            Some(path) => Some(self.queues.store().saved(path)?),
            None => (self.engine.as_ref()).map(|_| self.queues.store().identity()),
        };
        let read = |folder| Lora::load(folder, model, parameters.device());
        let adapters = folder.as_deref().map(read).transpose()?;
        let (adapters, dtype) = (adapters.as_ref(), self.base.dtype);
        let weights = PolicyWeights {
            version: 0,
            model,
            parameters,
            adapters,
        };
        Ok(Snapshot {
            source: match (&self.engine, &folder) {
                (Some(engine), Some(folder)) => {
                    Source::Engine(engine.open(folder, &weights, progress)?)
                }
                _ => Source::Local(Box::new(LocalGenerator::in_dtype(&weights, dtype)?)),
            },
            policy: Reference::with_adapters(model, parameters, adapters, dtype)?,
        })
    }

    /// Draws samples for a turn, and publishes each result as soon as it is complete.
    ///
    /// # Errors
    ///
    /// Fails if weights cannot be loaded or sampled from, or with [`Interrupted`] if the turn is in
    /// vain.
    fn draw(&self, turn: &SampleTurn) -> Result<()> {
        let requests = &turn.requests;
        let Some(first) = requests.first() else {
            return Ok(());
        };
        let queues = &*self.queues;
        let progress = UntilOver { queues, turn };
        let weights = turn.weights();
        let snapshots = weights.iter().map(|own| self.snapshot(own, &progress));
        let snapshots: Vec<Arc<Snapshot>> = snapshots.collect::<Result<_>>()?;
        let sampling = SamplingConfig {
            max_batch_size: self.max_batch_size,
            max_new_tokens: requests
                .iter()
                .map(|request| request.work.max_new_tokens)
                .max()
                .unwrap_or(1),
            ..first.work.sampling.clone()
        };
        let prompts: Vec<PromptRequest<'_>> = requests
            .iter()
            .map(|SampleRequest { work, .. }| PromptRequest {
                tokens: &work.prompt,
                seeds: (0..work.num_samples as u64)
                    .map(|sample| CompletionSeed {
                        seed: work.seed,
                        stream: 0,
                        prompt: 0,
                        sample,
                        turn: 0,
                    })
                    .collect(),
                max_new_tokens: work.max_new_tokens,
            })
            .collect();
        let snapshot_of = |request: &SampleRequest| {
            let found = weights.iter().position(|own| **own == request.work.weights);
            found.context("the weights are not in memory")
        };
        let adapters: Vec<usize> = requests.iter().map(snapshot_of).collect::<Result<_>>()?;
        // The request of each completion, and its place there.
        let places: Vec<(usize, usize)> = requests
            .iter()
            .enumerate()
            .flat_map(|(at, request)| (0..request.work.num_samples).map(move |place| (at, place)))
            .collect();
        let mut samples: Vec<Vec<Option<SampledTokens>>> = requests
            .iter()
            .map(|request| vec![None; request.work.num_samples])
            .collect();
        let mut deliver = |place: usize, completion: Completion| {
            let (at, place) = *places
                .get(place)
                .context("a completion that was not asked for")?;
            let (request, snapshot) = (&requests[at], &snapshots[adapters[at]]);
            samples[at][place] = Some(self.sampled(snapshot, &request.work, completion)?);
            if samples[at].iter().all(Option::is_some) {
                let outcome = Outcome::Samples {
                    sequences: samples[at].drain(..).flatten().collect(),
                    prompt_log_probs: self.prompt_log_probs(snapshot, &request.work)?,
                };
                queues.finish_samples(request, outcome);
            }
            Ok(())
        };
        let batch = GenerationBatch {
            prompts: &prompts,
            sampling: &sampling,
            decode: Some(&*self.base.decode),
            progress: &progress,
            records_experts: false,
            partial: None,
        };
        generate(&snapshots, &batch, &adapters, &mut deliver)
    }

    /// Computes log-probs for a request's last prompt tokens, at temperature 1. Those before
    /// them are NaN.
    fn prompt_log_probs(&self, snapshot: &Snapshot, work: &SampleWork) -> Result<Option<Vec<f32>>> {
        let Some(last) = work.prompt_log_probs else {
            return Ok(None);
        };
        let mut all = vec![f32::NAN; work.prompt.len()];
        if work.prompt.len() > 1 {
            let found = self.log_probs(snapshot, work.prompt.split_at(1), 1.)?;
            let first = work.prompt.len().saturating_sub(last).max(1);
            all[first..].copy_from_slice(&found[first - 1..]);
        }
        Ok(Some(all))
    }

    /// Computes log-probs for tokens after a prompt.
    fn log_probs(
        &self,
        snapshot: &Snapshot,
        tokens: (&[u32], &[u32]),
        temperature: f64,
    ) -> Result<Vec<f32>> {
        let _scoring = self.scoring.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = TokenBatch::new(&[tokens], self.base.parameters.device())?;
        let found = snapshot.policy.log_probs(&batch, temperature)?;
        Ok(found.flatten_all()?.to_vec1()?)
    }

    /// Converts a completion to a sample, whose log-probs are over all tokens. An engine may name
    /// those after filters, or none.
    fn sampled(
        &self,
        snapshot: &Snapshot,
        work: &SampleWork,
        completion: Completion,
    ) -> Result<SampledTokens> {
        let log_probs = match (completion.log_probs, &snapshot.source) {
            (Some(log_probs), _) => log_probs,
            (None, Source::Local(_)) => completion.drawn_log_probs,
            (None, Source::Engine(_)) => {
                let tokens = (&*work.prompt, &*completion.tokens);
                self.log_probs(snapshot, tokens, work.sampling.temperature)?
            }
        };
        Ok(SampledTokens {
            log_probs,
            is_cut: completion.finish_reason == FinishReason::Length,
            tokens: completion.tokens,
        })
    }
}

/// Samples from `snapshots` in one batch; `adapters` has the place of each prompt's.
fn generate(
    snapshots: &[Arc<Snapshot>],
    batch: &GenerationBatch<'_>,
    adapters: &[usize],
    deliver: &mut Deliver<'_>,
) -> Result<()> {
    if let [snapshot] = snapshots {
        return match &snapshot.source {
            Source::Local(generator) => generator.generate(batch, deliver),
            Source::Engine(generator) => generator.generate(batch, deliver),
        };
    }
    let decoders = snapshots.iter().map(|own| match &own.source {
        Source::Local(generator) => Ok(generator.model()),
        Source::Engine(_) => bail!("an engine makes its own batches"),
    });
    let decoders: Vec<&Decoder> = decoders.collect::<Result<_>>()?;
    let joined = LocalGenerator::from_decoder(Decoder::joined(&decoders)?);
    joined.generate_joined(batch, adapters, deliver)
}
