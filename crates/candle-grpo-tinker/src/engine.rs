//! The thread that trains and samples.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, safetensors};
use candle_grpo_base::atomic_file;
use candle_grpo_base::server::Refusal;
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::optim::DecayRule;
use candle_grpo_nn::{ActivationCheckpointing, AdamWConfig, Lora};
use candle_grpo_train::learn::{TargetOutput, TargetRow};
use candle_grpo_train::{Actor, ActorConfig};

use crate::base::Base;
use crate::config::TinkerConfig;
use crate::loss::LossFn;
use crate::queue::{Queues, SampleTurn, Turn};
use crate::sampling::{Snapshot, is_interrupted};
use crate::store::{ModelId, ModelRecord, SamplerRecord, Start, StateRecord, Store, WeightsPath};
use crate::wire::request::AdamParams;
use crate::work::{Answered, Outcome, SaveRequest, WeightsKind, Work};

/// The optimizer's file in a state and in training weights.
const OPTIMIZER: &str = "optimizer.safetensors";

/// Number of snapshots to sample from that stay in memory.
const LOADED_SNAPSHOTS: usize = 4;

/// Number of unnamed sampler weights that each model keeps in the folder.
const KEPT_UNNAMED: usize = 16;

/// The engine.
pub(crate) struct Engine {
    base: Base,
    config: TinkerConfig,
    queues: Arc<Queues>,
    /// Models in memory after their last request, the one that was used last at the end.
    models: Vec<(ModelId, Actor)>,
    /// Snapshots in memory, the one that was used last at the end.
    snapshots: Vec<(SamplerRecord, Snapshot)>,
}

impl Engine {
    pub(crate) fn new(base: Base, config: TinkerConfig, queues: Arc<Queues>) -> Self {
        Self {
            base,
            config,
            queues,
            models: Vec::new(),
            snapshots: Vec::new(),
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
        while let Some(turn) = queues.next_turn(self.config.max_batch_size) {
            match turn {
                Turn::Train(id, seq) => {
                    let trained = self.train(&id, seq);
                    // Nobody waits if the session was finished meanwhile.
                    if queues.model(&id).is_ok() {
                        trained.with_context(|| format!("{id}, request {seq}"))?;
                    }
                }
                Turn::Finish(id) => {
                    self.models.retain(|(other, _)| *other != id);
                    // A server that starts completes it.
                    if let Err(error) = queues.store().finish_model(&id) {
                        tracing::warn!("{id}: removing its files: {error:#}");
                    }
                }
                Turn::Sample(turn) => self.sample(&turn),
            }
        }
        Ok(())
    }

    /// Executes a training request, and publishes its result.
    ///
    /// # Errors
    ///
    /// Fails if the model cannot be brought into memory, or its requests, results and states cannot
    /// be read or written. The request then has no result, unless it was published.
    fn train(&mut self, id: &ModelId, seq: u64) -> Result<()> {
        let queues = Arc::clone(&self.queues);
        let store = queues.store();
        let request = store.read_request(id, seq)?;
        let (digest, work) = request.context("the request is not in the folder")?;
        let record = queues.model(id).map_err(refused)?;
        let mut actor = self.take(id, seq)?;
        let done = self.execute(id, &record, seq, &work, &mut actor);
        let outcome = done.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
        let answered = Answered { digest, outcome };
        if answered.outcome.starts_state() {
            self.save_state(id, seq, created(&mut actor)?, &answered)?;
        }
        queues.finish_training(id, seq, &answered)?;
        store.settle(id, seq, &work, &answered.outcome)?;
        // What failed may have changed a part of the actor: the folder has it without gradients.
        let actor = actor.filter(|_| !work.clears_gradients(&answered.outcome));
        self.models.extend(actor.map(|actor| (id.clone(), actor)));
        Ok(())
    }

    fn execute(
        &mut self,
        id: &ModelId,
        record: &ModelRecord,
        seq: u64,
        work: &Work,
        actor: &mut Option<Actor>,
    ) -> Result<Outcome> {
        match work {
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
                Ok(Outcome::Pass {
                    loss: found.loss,
                    log_probs: found.log_probs,
                })
            }
            Work::OptimStep(params) => optim_step(created(actor)?, params),
            Work::Save(request) => {
                let path = request.path(id);
                // They may be those that the request replaces.
                self.snapshots.retain(|(record, _)| !record.has(&path));
                let (actor, name) = (created(actor)?, &self.base.info.name);
                request.save(path, seq, actor, name, &self.queues)
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
    /// it was not created.
    fn take(&mut self, id: &ModelId, seq: u64) -> Result<Option<Actor>> {
        if let Some(place) = self.models.iter().position(|(other, _)| other == id) {
            return Ok(Some(self.models.remove(place).1));
        }
        while self.models.len() >= self.config.max_loaded_models {
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

    /// Draws samples, and publishes them.
    fn sample(&mut self, turn: &SampleTurn) {
        let message = match self.draw(turn) {
            Ok(()) => return,
            // Nobody waits, or clients send the requests again to the next server.
            Err(error) if is_interrupted(&error) => return,
            Err(error) => format!("{error:#}"),
        };
        tracing::warn!("sampling: {message}");
        self.queues.fail_samples(turn, &message);
    }

    fn draw(&mut self, turn: &SampleTurn) -> Result<()> {
        let Some(first) = turn.requests.first() else {
            return Ok(());
        };
        let record = &first.work.weights;
        let found = self.snapshots.iter().position(|(other, _)| other == record);
        match found {
            Some(place) => {
                let snapshot = self.snapshots.remove(place);
                self.snapshots.push(snapshot);
            }
            None => {
                while self.snapshots.len() >= LOADED_SNAPSHOTS {
                    self.snapshots.remove(0);
                }
                let adapters = match &record.model_path {
                    None => None,
                    Some(path) => {
                        let folder = folder_of(self.queues.store(), path)?;
                        let device = self.base.parameters.device();
                        Some(Lora::load(&folder, &self.base.info.model, device)?)
                    }
                };
                let snapshot = Snapshot::new(&self.base, adapters.as_ref())?;
                self.snapshots.push((record.clone(), snapshot));
            }
        }
        let Some((_, snapshot)) = self.snapshots.last() else {
            bail!("the weights are not in memory");
        };
        let size = self.config.max_batch_size;
        snapshot.sample(&self.base, turn, size, &self.queues)
    }
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
        path: WeightsPath,
        seq: u64,
        actor: &Actor,
        base_model: &str,
        queues: &Queues,
    ) -> Result<Outcome> {
        let id = &path.model;
        let folder = queues.store().weights(&path);
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

/// Returns the folder with saved weights.
fn folder_of(store: &Store, path: &str) -> Result<std::path::PathBuf> {
    let parsed = WeightsPath::parse(path).map_err(refused)?;
    let folder = store.weights(&parsed);
    if !folder.exists() {
        bail!("path: {path}, must be saved weights that were not removed");
    }
    Ok(folder)
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
    let folder = folder_of(store, path)?;
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
