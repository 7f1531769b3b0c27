//! The thread that trains, and samples unless an engine does.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, safetensors};
use candle_grpo_base::atomic_file;
use candle_grpo_base::server::Refusal;
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::optim::DecayRule;
use candle_grpo_nn::{ActivationCheckpointing, AdamWConfig, Lora};
use candle_grpo_train::learn::{TargetOutput, TargetPass, TargetRow};
use candle_grpo_train::{Actor, ActorConfig};

use crate::base::Base;
use crate::config::TinkerConfig;
use crate::loss::LossFn;
use crate::queue::{Queues, Turn, TurnLimits, Turns};
use crate::sampling::Sampler;
use crate::store::{Digest, ModelId, ModelRecord, Start, StateRecord, Store, WeightsPath};
use crate::wire::request::AdamParams;
use crate::work::{Answered, Outcome, SaveRequest, WeightsKind, Work};

/// The optimizer's file in a state and in training weights.
const OPTIMIZER: &str = "optimizer.safetensors";

/// Number of unnamed sampler weights that each model keeps in the folder.
const KEPT_UNNAMED: usize = 16;

/// The engine.
pub(crate) struct Engine {
    base: Arc<Base>,
    config: TinkerConfig,
    queues: Arc<Queues>,
    sampler: Arc<Sampler>,
    /// Models in memory after their last request, the one that was used last at the end.
    models: Vec<(ModelId, Actor)>,
    /// Models whose last pass failed. They do not share passes, which would fail, too.
    apart: BTreeSet<ModelId>,
}

impl Engine {
    pub(crate) fn new(
        base: Arc<Base>,
        config: TinkerConfig,
        queues: Arc<Queues>,
        sampler: Arc<Sampler>,
    ) -> Self {
        Self {
            base,
            config,
            queues,
            sampler,
            models: Vec::new(),
            apart: BTreeSet::new(),
        }
    }

    /// Works until the queues stop.
    ///
    /// # Errors
    ///
    /// Fails if the folder cannot be read or written. Requests without a result wait for the next
    /// server.
    pub(crate) fn run(mut self) -> Result<()> {
        let queues = Arc::clone(&self.queues);
        let limits = TurnLimits {
            samples: self.config.max_batch_size,
            // Experts have no joined decoder.
            weights: if self.base.info.model.has_experts() {
                1
            } else {
                self.config.max_loaded_models
            },
            tokens: self.config.micro_batch_tokens,
        };
        let turns = if self.sampler.num_threads() == 0 {
            Turns::All
        } else {
            Turns::Training
        };
        while let Some(turn) = queues.next_turn(limits, turns) {
            match turn {
                Turn::Train(requests) => self.train(requests)?,
                Turn::Finish(id) => {
                    self.models.retain(|(other, _)| *other != id);
                    self.apart.remove(&id);
                    // A server that starts completes it.
                    if let Err(error) = queues.store().finish_model(&id) {
                        tracing::warn!("{id}: removing its files: {error:#}");
                    }
                }
                Turn::Sample(turn) => self.sampler.sample(turn),
            }
        }
        Ok(())
    }

    /// Executes training requests, and publishes their results.
    ///
    /// # Errors
    ///
    /// Fails if a model cannot be brought into memory, or its requests, results and states cannot
    /// be read or written. The request then has no result, unless it was published.
    fn train(&mut self, requests: Vec<(ModelId, u64)>) -> Result<()> {
        let (alone, together): (Vec<_>, Vec<_>) =
            (requests.into_iter()).partition(|(id, _)| self.apart.contains(id));
        for request in alone {
            self.train_together(vec![request])?;
        }
        self.train_together(together)
    }

    /// [`Self::train`] with models that share a pass where they can.
    fn train_together(&mut self, requests: Vec<(ModelId, u64)>) -> Result<()> {
        let mut tasks = Vec::new();
        for (id, seq) in requests {
            let task = self.task(&id, seq, tasks.len());
            tasks.extend(self.unless_finished(&id, seq, task)?);
        }
        let mut outcomes = Vec::new();
        if tasks.len() > 1 {
            match joined_passes(&mut tasks) {
                Ok(found) => outcomes = found,
                // Alone, only those that cause it fail.
                Err(error) => {
                    tracing::info!(
                        "a shared pass fails, each request is executed alone: {error:#}"
                    );
                    tasks.iter_mut().for_each(|task| task.actor = None);
                }
            }
        }
        let mut outcomes = outcomes.into_iter();
        for mut task in tasks {
            let (id, seq) = (task.id.clone(), task.seq);
            let published = match outcomes.next() {
                Some(outcome) => self.publish(task, outcome),
                None => self
                    .execute(&mut task)
                    .and_then(|outcome| self.publish(task, outcome)),
            };
            self.unless_finished(&id, seq, published)?;
        }
        Ok(())
    }

    /// Drops an error if nobody waits, because the session was finished meanwhile.
    fn unless_finished<T>(&self, id: &ModelId, seq: u64, result: Result<T>) -> Result<Option<T>> {
        match result {
            Err(_) if self.queues.model(id).is_err() => Ok(None),
            result => result
                .map(Some)
                .with_context(|| format!("{id}, request {seq}")),
        }
    }

    /// Reads a request, and takes its model out of memory. There are `others` that were taken.
    fn task(&mut self, id: &ModelId, seq: u64, others: usize) -> Result<Task> {
        let queues = Arc::clone(&self.queues);
        let request = queues.store().read_request(id, seq)?;
        let (digest, work) = request.context("the request is not in the folder")?;
        Ok(Task {
            record: queues.model(id).map_err(refused)?,
            actor: self.take(id, seq, others)?,
            id: id.clone(),
            seq,
            digest,
            work,
        })
    }

    /// Executes a request alone.
    ///
    /// # Errors
    ///
    /// Fails if the model was not taken and cannot be brought into memory.
    fn execute(&mut self, task: &mut Task) -> Result<Outcome> {
        if task.actor.is_none() {
            task.actor = self.take(&task.id, task.seq, 0)?;
        }
        let done = self.outcome(task);
        Ok(done.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}"))))
    }

    /// Publishes a result, and keeps the model in memory.
    fn publish(&mut self, mut task: Task, outcome: Outcome) -> Result<()> {
        let (id, seq, digest) = (&task.id, task.seq, task.digest);
        let answered = Answered { digest, outcome };
        if answered.outcome.starts_state() {
            self.save_state(id, seq, created(&mut task.actor)?, &answered)?;
        }
        self.queues.finish_training(id, seq, &answered)?;
        let store = self.queues.store();
        store.settle(id, seq, &task.work, &answered.outcome)?;
        // What failed may have changed a part of the actor: the folder has it without gradients.
        let fails = task.work.clears_gradients(&answered.outcome);
        if fails {
            self.apart.insert(task.id.clone());
        } else {
            self.apart.remove(&task.id);
        }
        let actor = task.actor.filter(|_| !fails);
        self.models.extend(actor.map(|actor| (task.id, actor)));
        Ok(())
    }

    fn outcome(&mut self, task: &mut Task) -> Result<Outcome> {
        let Task {
            id,
            record,
            seq,
            work,
            actor,
            ..
        } = task;
        let (id, seq) = (&*id, *seq);
        match &*work {
            Work::Create => {
                *actor = Some(self.create(record)?);
                Ok(match &record.start {
                    Start::Seed(_) => Outcome::Created {
                        model_id: id.to_string(),
                    },
                    Start::Weights { path, .. } => Outcome::Loaded { path: path.clone() },
                })
            }
            Work::Pass {
                rows,
                loss,
                backward,
            } => {
                let found = self.pass(created(actor)?, rows, loss, *backward)?;
                Ok(found.into())
            }
            Work::OptimStep(params) => optim_step(created(actor)?, params),
            Work::Save(request) => {
                let path = request.path(id);
                let (actor, name) = (created(actor)?, &self.base.info.name);
                let saved = request.save(&path, seq, actor, name, &self.queues);
                // They may be those that the request has replaced.
                self.sampler.forget(&path);
                saved
            }
            Work::Load { path, optimizer } => {
                let own = created(actor)?;
                let loaded = actor_from(&self.base, self.queues.store(), path, *optimizer)?;
                ensure!(
                    own.adapters().map(Lora::config) == loaded.adapters().map(Lora::config),
                    "path: {path}, must have the adapters of the model (rank {}, train_attn: {}, train_mlp: {})",
                    record.rank,
                    record.train_attn,
                    record.train_mlp
                );
                *own = loaded;
                Ok(Outcome::Loaded { path: path.clone() })
            }
            Work::Refused(message) => Ok(Outcome::Refused(message.clone())),
        }
    }

    /// Creates a model.
    fn create(&self, record: &ModelRecord) -> Result<Actor> {
        let base = &self.base;
        match &record.start {
            Start::Seed(seed) => {
                let (config, device) = (base.info.lora(record)?, base.parameters.device());
                actor(base, Lora::init(config, &base.info.model, *seed, device)?)
            }
            Start::Weights { path, optimizer } => {
                actor_from(base, self.queues.store(), path, *optimizer)
            }
        }
    }

    fn pass(
        &self,
        actor: &mut Actor,
        rows: &[TargetRow],
        loss: &LossFn,
        backward: bool,
    ) -> Result<TargetOutput> {
        let (loss, tokens) = (loss.policy_loss(), self.config.micro_batch_tokens);
        if backward {
            actor.forward_backward_targets(rows, &loss, tokens)
        } else {
            actor.forward_targets(rows, &loss, tokens)
        }
    }

    /// Saves a model after the request `seq`, with its result.
    fn save_state(&self, id: &ModelId, seq: u64, actor: &Actor, answered: &Answered) -> Result<()> {
        let record = StateRecord {
            next: seq + 1,
            last: answered.clone(),
        };
        let folder = self.queues.store().state(id, seq + 1);
        save(actor, &folder, &self.base.info.name, true, |folder| {
            Store::write_state_record(folder, &record)
        })
    }

    /// Takes a model before the request `seq` out of memory, or reads it from the folder. `None` if
    /// it was not created. There are `others` that were taken.
    fn take(&mut self, id: &ModelId, seq: u64, others: usize) -> Result<Option<Actor>> {
        if let Some(place) = self.models.iter().position(|(other, _)| other == id) {
            return Ok(Some(self.models.remove(place).1));
        }
        while self.models.len() + others >= self.config.max_loaded_models && !self.models.is_empty()
        {
            self.models.remove(0);
        }
        let store = self.queues.store();
        let Some(state) = store.state_record(id)? else {
            return Ok(None);
        };
        let mut actor = read(&self.base, &store.state(id, state.next), true)?;
        // The state has no gradients.
        for seq in state.next..seq {
            let work = store.read_request(id, seq)?.map(|(_, work)| work);
            if let Some(Work::Pass {
                rows,
                loss,
                backward: true,
            }) = work
            {
                let repeated = self.pass(&mut actor, &rows, &loss, true);
                repeated.with_context(|| format!("repeating the request {seq}"))?;
            }
        }
        Ok(Some(actor))
    }
}

/// A training request that is executed.
struct Task {
    id: ModelId,
    record: ModelRecord,
    seq: u64,
    digest: Digest,
    work: Work,
    /// The model, unless it was not created.
    actor: Option<Actor>,
}

/// Executes the passes of several models as one.
///
/// # Errors
///
/// Fails if one of the passes does. The gradients of all models are then lost.
fn joined_passes(tasks: &mut [Task]) -> Result<Vec<Outcome>> {
    let losses = tasks.iter().map(|task| match &task.work {
        Work::Pass { loss, .. } => Ok(loss.policy_loss()),
        _ => bail!("not a pass"),
    });
    let losses: Vec<PolicyLoss> = losses.collect::<Result<_>>()?;
    let passes = tasks.iter_mut().zip(&losses).map(|(task, policy_loss)| {
        let Work::Pass { rows, .. } = &task.work else {
            bail!("not a pass");
        };
        Ok(TargetPass {
            actor: created(&mut task.actor)?,
            rows,
            policy_loss,
        })
    });
    let passes = passes.collect::<Result<_>>()?;
    let found = Actor::forward_backward_targets_joined(passes)?;
    Ok(found.into_iter().map(Outcome::from).collect())
}

/// The file in saved weights with their request's number.
const REQUEST: &str = "request";

/// Returns whether weights come from this request, whose result was not stored.
fn is_of(folder: &Path, seq: u64) -> bool {
    std::fs::read_to_string(folder.join(REQUEST)).is_ok_and(|found| found == seq.to_string())
}

/// Returns the actor of a model that was created.
fn created(actor: &mut Option<Actor>) -> Result<&mut Actor> {
    let must = "the model does not exist: the request that creates it has failed";
    actor.as_mut().context(must)
}

/// Converts a refusal to an error.
fn refused(refusal: Refusal) -> anyhow::Error {
    anyhow::anyhow!(refusal.message)
}

impl SaveRequest {
    /// Returns the path of a model's weights.
    fn path(&self, id: &ModelId) -> WeightsPath {
        WeightsPath {
            model: id.clone(),
            kind: self.kind,
            name: self.name.clone(),
        }
    }

    fn save(
        &self,
        path: &WeightsPath,
        seq: u64,
        actor: &Actor,
        base_model: &str,
        queues: &Queues,
    ) -> Result<Outcome> {
        let id = &path.model;
        let folder = queues.store().weights(path);
        if folder.exists() && !self.overwrite && !is_of(&folder, seq) {
            bail!(
                "path: {:?}, must be a new name, or overwrite must be true",
                self.name
            );
        }
        if let Some(number) = self.sampler {
            let known = queues.has_sampler(&id.session, number, &path.sampler());
            known.map_err(refused)?;
        }
        let optimizer = self.kind == WeightsKind::Training;
        save(actor, &folder, base_model, optimizer, |folder| {
            Ok(atomic_file::write(
                &folder.join(REQUEST),
                seq.to_string().as_bytes(),
            )?)
        })?;
        let Some(number) = self.sampler else {
            return Ok(Outcome::Saved {
                kind: self.kind,
                path: Some(path.to_string()),
                sampling_session_id: None,
            });
        };
        let sampler = queues.add_sampler(&id.session, number, path.sampler());
        let sampler = sampler.map_err(refused)?;
        keep_unnamed(queues, id)?;
        Ok(Outcome::Saved {
            kind: self.kind,
            path: None,
            sampling_session_id: Some(sampler.0),
        })
    }
}

/// Removes a model's unnamed sampler weights with their sampling sessions, except the last.
fn keep_unnamed(queues: &Queues, id: &ModelId) -> Result<()> {
    let numbers = queues.store().unnamed(id)?;
    for &number in numbers.iter().rev().skip(KEPT_UNNAMED) {
        let path = WeightsPath::unnamed(id, number);
        // Weights without a session are removed the next time.
        queues.remove_sampler(&id.session, number, &path.sampler())?;
        queues.store().remove_weights(&path)?;
    }
    Ok(())
}

/// Creates a policy with new optimizer state.
fn actor(base: &Base, adapters: Lora) -> Result<Actor> {
    let config = ActorConfig {
        policy_loss: PolicyLoss::default(),
        optimizer: AdamWConfig {
            decay: DecayRule::All,
            ..AdamWConfig::default()
        },
        temperature: 1.,
        activation_checkpointing: ActivationCheckpointing::default(),
        activation_offloading: false,
        compute_dtype: base.dtype,
        router_aux_loss_coef: 0.,
        distillation_loss: None,
    };
    Actor::with_adapters(
        base.info.model.clone(),
        base.parameters.clone(),
        adapters,
        config,
    )
}

/// Reads a policy from a folder, with the optimizer state if `optimizer`.
fn read(base: &Base, folder: &Path, optimizer: bool) -> Result<Actor> {
    let device = base.parameters.device();
    let adapters = Lora::load(folder, &base.info.model, device)?;
    let mut actor = actor(base, adapters)?;
    if optimizer {
        let file = folder.join(OPTIMIZER);
        let state = safetensors::load(&file, &Device::Cpu)
            .with_context(|| format!("the optimizer state in {}", file.display()))?;
        actor.optimizer_mut().load_state(state)?;
    }
    Ok(actor)
}

/// Reads a policy from saved weights.
fn actor_from(base: &Base, store: &Store, path: &str, optimizer: bool) -> Result<Actor> {
    let folder = store.saved(path)?;
    if optimizer && !folder.join(OPTIMIZER).exists() {
        bail!("path: {path}, must have optimizer state: weights of save_weights");
    }
    read(base, &folder, optimizer)
}

/// Saves a policy to a folder, which appears completely or not at all.
fn save(
    actor: &Actor,
    folder: &Path,
    base_model: &str,
    optimizer: bool,
    more: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let adapters = actor.adapters().context("the policy has no adapters")?;
    if let Some(parent) = folder.parent() {
        std::fs::create_dir_all(parent)?;
    }
    atomic_file::write_folder(folder, |folder| {
        adapters.save(folder, Some(base_model))?;
        if optimizer {
            actor.optimizer().save_state(&folder.join(OPTIMIZER))?;
        }
        more(folder)
    })
}

fn optim_step(actor: &mut Actor, params: &AdamParams) -> Result<Outcome> {
    let optimizer = actor.optimizer_mut();
    let config = AdamWConfig {
        learning_rate: params.learning_rate,
        beta1: params.beta1,
        beta2: params.beta2,
        epsilon: params.eps,
        weight_decay: params.weight_decay,
        ..optimizer.config().clone()
    };
    optimizer.set_config(config)?;
    let max_norm = match params.grad_clip_norm {
        norm if norm > 0. => norm,
        _ => f64::INFINITY,
    };
    let stats = actor.clip_grad_and_step(max_norm)?;
    Ok(Outcome::OptimStep {
        grad_norm: stats.grad_norm,
        learning_rate: stats.learning_rate,
    })
}
