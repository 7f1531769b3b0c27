//! Requests that wait for the engine, and their results.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use candle_grpo_base::server::{Refusal, random_id};
use tokio::sync::watch;

use crate::sampling::SampleWork;
use crate::store::{Digest, Found, ModelId, ModelRecord, SamplerRecord, Store, StoredRequest};
use crate::work::{Answered, Outcome, Work};

/// Number of retrieved results that each queue keeps, for clients that ask again.
const KEPT_RESULTS: usize = 64;

/// Number of sampling sessions that each session keeps.
const KEPT_SAMPLERS: usize = 256;

/// A sampling session, or the queue for requests without one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SamplerId(pub(crate) String);

/// A queue with work.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Queue {
    Model(ModelId),
    /// A model whose session was finished.
    Finished(ModelId),
    Sampler(SamplerId),
}

/// The engine's next work.
pub(crate) enum Turn {
    /// Execute requests for training: one, or the passes of several models.
    Train(Vec<(ModelId, u64)>),
    Sample(SampleTurn),
    /// Remove a model whose session was finished.
    Finish(ModelId),
}

/// The turns that a thread takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turns {
    All,
    /// All but samples.
    Training,
    Samples,
}

/// Requests with one distribution, from one or several weights.
#[derive(Debug, Default)]
pub(crate) struct SampleTurn {
    pub(crate) requests: Vec<SampleRequest>,
}

/// Bounds for a turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TurnLimits {
    /// Number of samples, unless a single request has more.
    pub(crate) samples: usize,
    /// Number of different weights to sample from, and of models to train.
    pub(crate) weights: usize,
    /// Number of tokens in the passes of several models.
    pub(crate) tokens: usize,
}

/// A request for samples.
#[derive(Debug)]
pub(crate) struct SampleRequest {
    sampler: SamplerId,
    seq: u64,
    /// Distinguishes it from a canceled request with the same number, which may still run.
    ticket: u64,
    pub(crate) work: SampleWork,
}

/// A promised request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum RequestId {
    Train(ModelId, u64),
    Sample(SamplerId, u64),
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Train(model, seq) => write!(f, "{model}#{seq}"),
            Self::Sample(sampler, seq) => write!(f, "{}#{seq}", sampler.0),
        }
    }
}

impl RequestId {
    /// Reads what [`Self::fmt`] writes.
    pub(crate) fn parse(id: &str) -> Result<Self, Refusal> {
        let parsed = id.rsplit_once('#').and_then(|(queue, seq)| {
            let seq = seq.parse().ok()?;
            Some(match ModelId::parse(queue) {
                Ok(model) => Self::Train(model, seq),
                Err(_) => Self::Sample(SamplerId(queue.to_owned()), seq),
            })
        });
        parsed.ok_or_else(|| unknown("request_id", id))
    }
}

/// A training request without a result.
#[derive(Debug)]
struct Waiting {
    digest: Digest,
    /// True once it is in the folder.
    is_stored: bool,
    /// See [`Work::joined_tokens`].
    joined_tokens: Option<usize>,
}

#[derive(Debug)]
struct Model {
    record: ModelRecord,
    /// Requests without a result.
    waiting: BTreeMap<u64, Waiting>,
    /// Sequence number of the next request to execute.
    next: u64,
    /// Results in the folder.
    done: BTreeSet<u64>,
    /// Retrieved results, the oldest first.
    retrieved: VecDeque<u64>,
}

#[derive(Debug)]
struct Sampler {
    record: SamplerRecord,
    /// Requests that have not started.
    waiting: VecDeque<SampleRequest>,
    /// Tickets for requests without a result, started or not.
    pending: BTreeMap<u64, u64>,
    /// Results that were not retrieved, the oldest first.
    done: VecDeque<(u64, Arc<Outcome>)>,
    /// Retrieved results, the oldest first.
    retrieved: VecDeque<(u64, Arc<Outcome>)>,
    /// Sequence number for a request without one.
    next: u64,
    /// The next request's ticket.
    next_ticket: u64,
    /// When it was used last, in [`State::uses`].
    used: u64,
}

impl Model {
    /// Creates a queue with what is in the folder.
    fn new(record: ModelRecord, found: Found) -> Self {
        let waiting = found.waiting.into_iter().map(|(seq, digest)| {
            let waiting = Waiting {
                digest,
                is_stored: true,
                joined_tokens: None,
            };
            (seq, waiting)
        });
        Self {
            record,
            waiting: waiting.collect(),
            next: found.next,
            done: found.results.into_iter().collect(),
            retrieved: VecDeque::new(),
        }
    }

    /// Returns the next request, if it can be executed.
    fn ready(&self) -> Option<&Waiting> {
        let next = self.waiting.get(&self.next);
        next.filter(|waiting| waiting.is_stored)
    }

    fn is_ready(&self) -> bool {
        self.ready().is_some()
    }

    /// Notes that a result was retrieved. Returns one that need not be kept any longer.
    fn retrieve(&mut self, seq: u64) -> Option<u64> {
        if !self.retrieved.contains(&seq) {
            self.retrieved.push_back(seq);
        }
        if self.retrieved.len() <= KEPT_RESULTS {
            return None;
        }
        // The last result says where a server that starts again continues.
        let old = self
            .retrieved
            .pop_front()
            .filter(|old| old + 1 != self.next);
        if let Some(old) = &old {
            self.done.remove(old);
        }
        old
    }
}

impl Turns {
    /// Returns whether they have those of `queue`.
    fn have(self, queue: &Queue) -> bool {
        match self {
            Self::All => true,
            Self::Training => !matches!(queue, Queue::Sampler(_)),
            Self::Samples => matches!(queue, Queue::Sampler(_)),
        }
    }
}

impl SampleTurn {
    /// Returns the different weights, in the order of their first requests.
    pub(crate) fn weights(&self) -> Vec<&SamplerRecord> {
        let mut weights = Vec::new();
        for request in &self.requests {
            if !weights.contains(&&request.work.weights) {
                weights.push(&request.work.weights);
            }
        }
        weights
    }

    /// Divides it into turns with one weight each.
    pub(crate) fn by_weights(self) -> Vec<Self> {
        let mut turns: Vec<Self> = Vec::new();
        for request in self.requests {
            let weights = &request.work.weights;
            let same = |turn: &&mut Self| turn.requests.iter().any(|r| r.work.weights == *weights);
            match turns.iter_mut().find(same) {
                Some(turn) => turn.requests.push(request),
                None => turns.push(Self {
                    requests: vec![request],
                }),
            }
        }
        turns
    }

    /// Returns whether a request with this work fits.
    fn admits(&self, work: &SampleWork, limits: TurnLimits) -> bool {
        let Some(first) = self.requests.first() else {
            return true;
        };
        let samples = self.requests.iter().map(|request| request.work.num_samples);
        let weights = self.weights();
        work.sampling == first.work.sampling
            && samples.sum::<usize>() + work.num_samples <= limits.samples
            && (weights.contains(&&work.weights) || weights.len() < limits.weights)
    }
}

impl Sampler {
    fn new(record: SamplerRecord, used: u64) -> Self {
        Self {
            record,
            waiting: VecDeque::new(),
            pending: BTreeMap::new(),
            done: VecDeque::new(),
            retrieved: VecDeque::new(),
            next: 0,
            next_ticket: 0,
            used,
        }
    }

    /// Moves the waiting requests that fit to a turn. The others stay in their order.
    fn join(&mut self, turn: &mut SampleTurn, limits: TurnLimits) {
        for request in std::mem::take(&mut self.waiting) {
            if turn.admits(&request.work, limits) {
                turn.requests.push(request);
            } else {
                self.waiting.push_back(request);
            }
        }
    }

    /// Returns whether a request has neither a result nor was canceled.
    fn is_pending(&self, request: &SampleRequest) -> bool {
        self.pending.get(&request.seq) == Some(&request.ticket)
    }

    /// Returns a result, and notes that it was retrieved.
    fn retrieve(&mut self, seq: u64) -> Option<Arc<Outcome>> {
        if let Some(at) = self.done.iter().position(|(done, _)| *done == seq) {
            self.retrieved.extend(self.done.remove(at));
            if self.retrieved.len() > KEPT_RESULTS {
                self.retrieved.pop_front();
            }
        }
        let found = self.retrieved.iter().find(|(done, _)| *done == seq);
        found.map(|(_, outcome)| Arc::clone(outcome))
    }
}

#[derive(Debug, Default)]
struct State {
    /// Sessions; true if finished.
    sessions: HashMap<String, bool>,
    models: HashMap<ModelId, Model>,
    samplers: HashMap<SamplerId, Sampler>,
    /// Number of times that a sampling session was created or used.
    uses: u64,
    /// Queues with work, each once, in turn.
    turns: VecDeque<Queue>,
    is_stopped: bool,
    /// The reason why the engine has ended.
    failure: Option<String>,
}

/// All sessions' queues.
#[derive(Debug)]
pub(crate) struct Queues {
    store: Store,
    /// The queue for requests without a sampling session. Another server has another one, so that
    /// its requests have other ids.
    direct: SamplerId,
    max_waiting: usize,
    state: Mutex<State>,
    /// Held while a model or a sampling session is created, so that its number has one file.
    creation: Mutex<()>,
    has_work: Condvar,
    /// Counts results, for requests that wait for one.
    results: watch::Sender<u64>,
}

fn too_many(max_waiting: usize) -> Refusal {
    let message = format!("{max_waiting} requests wait, --max-waiting: send this one later");
    Refusal::new(429, "too_many_requests", message)
}

fn failed(reason: &str) -> Refusal {
    let message = format!("the engine has ended, and the server must start again: {reason}");
    Refusal::new(503, "engine_failed", message)
}

/// Converts a folder failure.
pub(crate) fn internal(error: anyhow::Error) -> Refusal {
    tracing::error!("{error:#}");
    Refusal::new(500, "internal_error", format!("{error:#}"))
}

fn ensure_session(state: &State, id: &str) -> Result<(), Refusal> {
    match state.sessions.get(id) {
        Some(false) => Ok(()),
        Some(true) => {
            let message = format!("session_id: {id}, must be a session that is not finished");
            Err(Refusal::new(410, "session_finished", message))
        }
        None => Err(unknown("session_id", id)),
    }
}

/// Refuses the number of another model or sampling session.
fn taken(name: &str, number: u64, kind: &str) -> Refusal {
    let must = format!("be the number of one {kind}: another one of this session has it");
    Refusal::invalid(name, number, &must)
}

fn unknown(name: &str, id: &str) -> Refusal {
    Refusal::missing(name, id, "be one that this server returned")
}

fn unknown_sampler(id: &SamplerId) -> Refusal {
    let must = format!(
        "be one that this server returned, among the last {KEPT_SAMPLERS} that its session used"
    );
    Refusal::missing("sampling_session_id", &id.0, &must)
}

impl Queues {
    /// Reads the sessions in `store`.
    pub(crate) fn new(store: Store, max_waiting: usize) -> Result<Self> {
        let mut state = State::default();
        let direct = SamplerId(format!("direct:{}", random_id()));
        let sampler = Sampler::new(SamplerRecord { model_path: None }, 0);
        state.samplers.insert(direct.clone(), sampler);
        for session in store.sessions()? {
            let finished = store.is_finished(&session);
            state.sessions.insert(session.clone(), finished);
            if finished {
                let models = store.models(&session)?;
                models.iter().try_for_each(|id| store.finish_model(id))?;
                continue;
            }
            for id in store.models(&session)? {
                let model = Model::new(store.model_record(&id)?, store.recover(&id)?);
                if model.is_ready() {
                    state.turns.push_back(Queue::Model(id.clone()));
                }
                state.models.insert(id, model);
            }
            for (number, record) in store.samplers(&session)? {
                state.add_sampler(sampler_id(&session, number), record);
            }
        }
        Ok(Self {
            store,
            direct,
            max_waiting,
            state: Mutex::new(state),
            creation: Mutex::new(()),
            has_work: Condvar::new(),
            results: watch::Sender::new(0),
        })
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the queue for requests without a sampling session.
    pub(crate) fn direct(&self) -> &SamplerId {
        &self.direct
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn creation(&self) -> MutexGuard<'_, ()> {
        self.creation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a session that is in the folder.
    pub(crate) fn add_session(&self, id: String) {
        self.state().sessions.insert(id, false);
    }

    /// Checks that a session exists and is not finished.
    pub(crate) fn ensure_session(&self, id: &str) -> Result<(), Refusal> {
        ensure_session(&self.state(), id)
    }

    /// Ends a session: its requests are dropped, its saved weights stay. The engine removes the
    /// other files, because it may be writing some.
    pub(crate) fn finish(&self, session: &str) -> Result<(), Refusal> {
        if !self.state().sessions.contains_key(session) {
            return Err(unknown("session_id", session));
        }
        self.store.finish(session).map_err(internal)?;
        let mut state = self.state();
        state.sessions.insert(session.to_owned(), true);
        let models = state.models.extract_if(|id, _| id.session == session);
        let models: Vec<ModelId> = models.map(|(id, _)| id).collect();
        for id in models {
            state.add_turn(Queue::Finished(id));
        }
        let prefix = format!("{session}:");
        state.samplers.retain(|id, _| !id.0.starts_with(&prefix));
        drop(state);
        self.has_work.notify_all();
        self.results.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns a model's record.
    pub(crate) fn model(&self, id: &ModelId) -> Result<ModelRecord, Refusal> {
        let state = self.state();
        let record = state.models.get(id).map(|model| model.record.clone());
        record.ok_or_else(|| unknown("model_id", &id.to_string()))
    }

    /// Adds a model, unless it exists.
    ///
    /// # Errors
    ///
    /// Refuses a number that a model with other options has.
    pub(crate) fn add_model(&self, id: &ModelId, record: ModelRecord) -> Result<(), Refusal> {
        let _creation = self.creation();
        if let Ok(known) = self.model(id) {
            if known != record {
                return Err(taken("model_seq_id", id.number, "model"));
            }
            return Ok(());
        }
        self.store.add_model(id, &record).map_err(internal)?;
        let mut state = self.state();
        ensure_session(&state, &id.session)?;
        let model = Model::new(record, Found::default());
        state.models.insert(id.clone(), model);
        Ok(())
    }

    /// Promises a training request, once it is in the folder. A repeated request has the same id.
    pub(crate) fn promise(
        &self,
        id: &ModelId,
        seq: Option<u64>,
        work: &Work,
    ) -> Result<RequestId, Refusal> {
        let request = StoredRequest::new(work).map_err(internal)?;
        let digest = request.digest();
        let seq = {
            let mut state = self.state();
            let model = state.models.get_mut(id);
            let model = model.ok_or_else(|| unknown("model_id", &id.to_string()))?;
            let last = model
                .waiting
                .keys()
                .next_back()
                .map_or(0, |last| last.saturating_add(1));
            let seq = seq.unwrap_or_else(|| model.next.max(last).max(1));
            if let Some(first) = model.waiting.get(&seq) {
                return repeated(id, seq, first.digest == digest);
            }
            let next = model.next;
            if seq < next {
                drop(state);
                let first = self.store.read_result(id, seq).map_err(internal)?;
                let first = first.ok_or_else(|| {
                    let must = format!("be at least {next}: this request's result was dropped");
                    Refusal::invalid("seq_id", seq, &must)
                })?;
                return repeated(id, seq, first.digest == digest);
            }
            // The others wait for the next one.
            if seq != next && model.waiting.len() >= self.max_waiting {
                return Err(too_many(self.max_waiting));
            }
            // Reserved, so that a repetition does not write it again.
            let waiting = Waiting {
                digest,
                is_stored: false,
                joined_tokens: work.joined_tokens(),
            };
            model.waiting.insert(seq, waiting);
            seq
        };
        if let Err(error) = self.store.add_request(id, seq, &request) {
            if let Some(model) = self.state().models.get_mut(id) {
                model.waiting.remove(&seq);
            }
            return Err(internal(error));
        }
        let mut state = self.state();
        let Some(model) = state.models.get_mut(id) else {
            drop(state);
            self.store.remove_request(id, seq).map_err(internal)?;
            return Err(unknown("model_id", &id.to_string()));
        };
        if let Some(waiting) = model.waiting.get_mut(&seq) {
            waiting.is_stored = true;
        }
        if seq == model.next {
            state.add_turn(Queue::Model(id.clone()));
            self.has_work.notify_all();
        }
        Ok(RequestId::Train(id.clone(), seq))
    }

    /// Adds a sampling session, unless it exists. Returns its id.
    ///
    /// # Errors
    ///
    /// Refuses a number that a sampling session with other weights has.
    ///
    /// Each session keeps [`KEPT_SAMPLERS`]: a new one replaces that without requests that was not
    /// used for the longest time.
    pub(crate) fn add_sampler(
        &self,
        session: &str,
        number: u64,
        record: SamplerRecord,
    ) -> Result<SamplerId, Refusal> {
        let id = sampler_id(session, number);
        let _creation = self.creation();
        if self.has_sampler(session, number, &record)? {
            return Ok(id);
        }
        self.make_room(session)?;
        self.store
            .add_sampler(session, number, &record)
            .map_err(internal)?;
        let mut state = self.state();
        ensure_session(&state, session)?;
        state.add_sampler(id.clone(), record);
        Ok(id)
    }

    /// Makes room for one more sampling session.
    fn make_room(&self, session: &str) -> Result<(), Refusal> {
        let prefix = sampler_prefix(session);
        let oldest = {
            let mut state = self.state();
            let own = state.samplers.iter().filter_map(|(id, sampler)| {
                let number: u64 = id.0.strip_prefix(&prefix)?.parse().ok()?;
                Some((number, sampler))
            });
            let own: Vec<(u64, &Sampler)> = own.collect();
            if own.len() < KEPT_SAMPLERS {
                return Ok(());
            }
            let idle = own.iter().filter(|(_, sampler)| sampler.pending.is_empty());
            let Some(&(number, _)) = idle.min_by_key(|(_, sampler)| sampler.used) else {
                let message = format!(
                    "{KEPT_SAMPLERS} sampling sessions have requests without a result: send this one later"
                );
                return Err(Refusal::new(429, "too_many_requests", message));
            };
            state.samplers.remove(&sampler_id(session, number));
            number
        };
        self.store.remove_sampler(session, oldest).map_err(internal)
    }

    /// Returns whether a sampling session with these weights has this number.
    ///
    /// # Errors
    ///
    /// Refuses a number that a sampling session with other weights has.
    pub(crate) fn has_sampler(
        &self,
        session: &str,
        number: u64,
        record: &SamplerRecord,
    ) -> Result<bool, Refusal> {
        match self.sampler(&sampler_id(session, number)) {
            Ok(known) if known == *record => Ok(true),
            Ok(_) => Err(taken("sampling_session_seq_id", number, "sampling session")),
            Err(_) => Ok(false),
        }
    }

    /// Removes a sampling session, if it has these weights. Its requests are dropped.
    pub(crate) fn remove_sampler(
        &self,
        session: &str,
        number: u64,
        record: &SamplerRecord,
    ) -> Result<()> {
        let _creation = self.creation();
        if !matches!(self.has_sampler(session, number, record), Ok(true)) {
            return Ok(());
        }
        self.store.remove_sampler(session, number)?;
        self.state().samplers.remove(&sampler_id(session, number));
        self.results.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns a sampling session's record.
    pub(crate) fn sampler(&self, id: &SamplerId) -> Result<SamplerRecord, Refusal> {
        let state = self.state();
        let sampler = state.samplers.get(id).filter(|_| *id != self.direct);
        let record = sampler.map(|sampler| sampler.record.clone());
        record.ok_or_else(|| unknown_sampler(id))
    }

    /// Promises samples. A repeated request has the same id. The promise does not survive the
    /// server: the client must send it again.
    pub(crate) fn promise_samples(
        &self,
        id: &SamplerId,
        seq: Option<u64>,
        work: impl FnOnce(&RequestId) -> SampleWork,
    ) -> Result<RequestId, Refusal> {
        let mut state = self.state();
        state.uses += 1;
        let uses = state.uses;
        let sampler = state.samplers.get_mut(id);
        let sampler = sampler.ok_or_else(|| unknown_sampler(id))?;
        sampler.used = uses;
        let seq = seq.unwrap_or(sampler.next);
        let request = RequestId::Sample(id.clone(), seq);
        let mut done = sampler.retrieved.iter().chain(&sampler.done);
        if sampler.pending.contains_key(&seq) || done.any(|(done, _)| *done == seq) {
            return Ok(request);
        }
        if sampler.pending.len() >= self.max_waiting {
            return Err(too_many(self.max_waiting));
        }
        sampler.next = sampler.next.max(seq.saturating_add(1));
        let ticket = sampler.next_ticket;
        sampler.next_ticket += 1;
        sampler.pending.insert(seq, ticket);
        let work = work(&request);
        sampler.waiting.push_back(SampleRequest {
            sampler: id.clone(),
            seq,
            ticket,
            work,
        });
        state.add_turn(Queue::Sampler(id.clone()));
        self.has_work.notify_all();
        Ok(request)
    }

    /// Drops a request for samples, and its result.
    pub(crate) fn cancel(&self, id: &RequestId) {
        let RequestId::Sample(sampler, seq) = id else {
            return;
        };
        if let Some(sampler) = self.state().samplers.get_mut(sampler) {
            sampler.waiting.retain(|waiting| waiting.seq != *seq);
            sampler.pending.remove(seq);
            sampler.done.retain(|(done, _)| done != seq);
            sampler.retrieved.retain(|(done, _)| done != seq);
        }
        self.results.send_modify(|count| *count += 1);
    }

    /// Waits for work. `None` after [`Self::stop`].
    pub(crate) fn next_turn(&self, limits: TurnLimits, turns: Turns) -> Option<Turn> {
        let mut state = self.state();
        loop {
            if state.is_stopped {
                return None;
            }
            let next = state.turns.iter().position(|queue| turns.have(queue));
            if let Some(queue) = next.and_then(|at| state.turns.remove(at)) {
                if let Some(turn) = state.turn(queue, limits) {
                    return Some(turn);
                }
                continue;
            }
            state = self
                .has_work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends [`Self::next_turn`].
    pub(crate) fn stop(&self) {
        self.state().is_stopped = true;
        self.has_work.notify_all();
    }

    /// Notes that the engine has ended. Requests without a result wait for the next server.
    pub(crate) fn fail(&self, reason: String) {
        tracing::error!("the engine has ended: {reason}");
        self.state().failure = Some(reason);
        self.results.send_modify(|count| *count += 1);
    }

    /// Checks that the engine works.
    pub(crate) fn ensure_working(&self) -> Result<(), Refusal> {
        match &self.state().failure {
            Some(reason) => Err(failed(reason)),
            None => Ok(()),
        }
    }

    /// Publishes a training request's result, once it is in the folder.
    pub(crate) fn finish_training(
        &self,
        id: &ModelId,
        seq: u64,
        answered: &Answered,
    ) -> Result<()> {
        self.store.add_result(id, seq, answered)?;
        let mut state = self.state();
        if let Some(model) = state.models.get_mut(id) {
            model.waiting.remove(&seq);
            model.done.insert(seq);
            model.next = seq + 1;
            if model.is_ready() {
                state.add_turn(Queue::Model(id.clone()));
            }
        }
        drop(state);
        self.results.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Publishes a sampling request's result, unless it was canceled. If nobody retrieves results,
    /// the oldest are dropped.
    pub(crate) fn finish_samples(&self, request: &SampleRequest, outcome: Outcome) {
        let mut state = self.state();
        if let Some(sampler) = state.samplers.get_mut(&request.sampler)
            && sampler.is_pending(request)
        {
            sampler.pending.remove(&request.seq);
            sampler.done.push_back((request.seq, Arc::new(outcome)));
            if sampler.done.len() > self.max_waiting {
                sampler.done.pop_front();
            }
        }
        drop(state);
        self.results.send_modify(|count| *count += 1);
    }

    /// Publishes a failure for a turn's requests without a result.
    pub(crate) fn fail_samples(&self, turn: &SampleTurn, message: &str) {
        for request in &turn.requests {
            self.finish_samples(request, Outcome::Failed(message.to_owned()));
        }
    }

    /// Returns whether a turn is in vain: the server stops, or all its requests have a result or
    /// were canceled.
    pub(crate) fn is_over(&self, turn: &SampleTurn) -> bool {
        let state = self.state();
        let mut requests = turn.requests.iter();
        state.is_stopped || !requests.any(|request| state.is_pending(request))
    }

    /// Removes a turn's requests that have a result or were canceled.
    pub(crate) fn keep_pending(&self, turn: &mut SampleTurn) {
        let state = self.state();
        turn.requests.retain(|request| state.is_pending(request));
    }

    /// Returns a receiver that changes with each result.
    pub(crate) fn results(&self) -> watch::Receiver<u64> {
        self.results.subscribe()
    }

    /// Returns whether a request has no result yet. Reads no file.
    ///
    /// # Errors
    ///
    /// Fails if the request waits for an engine that has ended.
    pub(crate) fn is_pending(&self, id: &RequestId) -> Result<bool, Refusal> {
        let state = self.state();
        let is_pending = match id {
            RequestId::Train(model, seq) => {
                let model = state.models.get(model);
                model.is_some_and(|model| model.waiting.contains_key(seq))
            }
            RequestId::Sample(sampler, seq) => {
                let sampler = state.samplers.get(sampler);
                sampler.is_some_and(|sampler| sampler.pending.contains_key(seq))
            }
        };
        match &state.failure {
            Some(reason) if is_pending => Err(failed(reason)),
            _ => Ok(is_pending),
        }
    }

    /// Returns a request's result. `None` if the server has none, or no longer: the client must
    /// send the request again.
    pub(crate) fn retrieve(&self, id: &RequestId) -> Result<Option<Arc<Outcome>>, Refusal> {
        match id {
            RequestId::Train(id, seq) => {
                let is_done = |model: &Model| model.done.contains(seq);
                if !self.state().models.get(id).is_some_and(is_done) {
                    return Ok(None);
                }
                // Read first: once it is noted, others that are retrieved may remove it.
                let answered = self.store.read_result(id, *seq).map_err(internal)?;
                let old = {
                    let mut state = self.state();
                    let model = state.models.get_mut(id);
                    model.and_then(|model| model.retrieve(*seq))
                };
                if let Some(old) = old {
                    self.store.remove_result(id, old).map_err(internal)?;
                }
                Ok(answered.map(|answered| Arc::new(answered.outcome)))
            }
            RequestId::Sample(id, seq) => {
                let mut state = self.state();
                let sampler = state.samplers.get_mut(id);
                Ok(sampler.and_then(|sampler| sampler.retrieve(*seq)))
            }
        }
    }
}

fn repeated(id: &ModelId, seq: u64, is_equal: bool) -> Result<RequestId, Refusal> {
    if is_equal {
        return Ok(RequestId::Train(id.clone(), seq));
    }
    let must = "be the number of one request: another one of this model has it";
    Err(Refusal::invalid("seq_id", seq, must))
}

/// Returns a sampling session's id.
fn sampler_id(session: &str, number: u64) -> SamplerId {
    SamplerId(format!("{}{number}", sampler_prefix(session)))
}

/// Returns the part of a sampling session's id before its number.
fn sampler_prefix(session: &str) -> String {
    format!("{session}:sample:")
}

impl State {
    fn add_sampler(&mut self, id: SamplerId, record: SamplerRecord) {
        self.uses += 1;
        self.samplers.insert(id, Sampler::new(record, self.uses));
    }

    fn add_turn(&mut self, queue: Queue) {
        if !self.turns.contains(&queue) {
            self.turns.push_back(queue);
        }
    }

    /// Returns whether a request for samples has neither a result nor was canceled.
    fn is_pending(&self, request: &SampleRequest) -> bool {
        let sampler = self.samplers.get(&request.sampler);
        sampler.is_some_and(|sampler| sampler.is_pending(request))
    }

    /// Takes a queue's work. Requests for samples and passes in other queues join, as far as they
    /// fit.
    fn turn(&mut self, queue: Queue, limits: TurnLimits) -> Option<Turn> {
        match queue {
            Queue::Model(id) => {
                let model = self.models.get(&id)?;
                let mut left = match model.ready()?.joined_tokens {
                    Some(tokens) => limits.tokens.checked_sub(tokens),
                    None => None,
                };
                let mut requests = vec![(id.clone(), model.next)];
                for queue in &self.turns {
                    if requests.len() >= limits.weights {
                        break;
                    }
                    if let Queue::Model(other) = queue
                        && *other != id
                        && let Some(model) = self.models.get(other)
                        && let Some(tokens) = model.ready().and_then(|next| next.joined_tokens)
                        && let Some(room) = left.and_then(|left| left.checked_sub(tokens))
                    {
                        requests.push((other.clone(), model.next));
                        left = Some(room);
                    }
                }
                Some(Turn::Train(requests))
            }
            Queue::Finished(id) => Some(Turn::Finish(id)),
            Queue::Sampler(id) => {
                let mut turn = SampleTurn::default();
                let sampler = self.samplers.get_mut(&id)?;
                sampler.join(&mut turn, limits);
                if !sampler.waiting.is_empty() {
                    self.add_turn(Queue::Sampler(id));
                }
                for queue in &self.turns {
                    if let Queue::Sampler(id) = queue
                        && let Some(sampler) = self.samplers.get_mut(id)
                    {
                        sampler.join(&mut turn, limits);
                    }
                }
                (!turn.requests.is_empty()).then_some(Turn::Sample(turn))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use candle_grpo_train::SamplingConfig;
    use candle_grpo_train::learn::TargetRow;
    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;
    use crate::loss::LossFn;
    use crate::store::Start;

    /// Returns queues with a session.
    fn queues(max_waiting: usize) -> (TempDir, Queues, String) {
        let folder = tempfile::tempdir().unwrap();
        let queues = Queues::new(Store::open(folder.path()).unwrap(), max_waiting).unwrap();
        let session = "0".repeat(32);
        queues.add_session(session.clone());
        (folder, queues, session)
    }

    fn record() -> ModelRecord {
        ModelRecord {
            start: Start::Seed(1),
            rank: 1,
            train_attn: true,
            train_mlp: true,
        }
    }

    fn model(session: &str, number: u64) -> ModelId {
        ModelId {
            session: session.to_owned(),
            number,
        }
    }

    fn work(text: &str) -> Work {
        Work::Refused(text.to_owned())
    }

    /// Executes the next request of a model, and returns it.
    fn train(queues: &Queues) -> (u64, u64) {
        let found = train_within(queues, limits(1));
        let [found] = found[..] else {
            panic!("{found:?}");
        };
        found
    }

    /// Executes the next turn of models, and returns its requests.
    fn train_within(queues: &Queues, limits: TurnLimits) -> Vec<(u64, u64)> {
        let Some(Turn::Train(requests)) = queues.next_turn(limits, Turns::All) else {
            panic!("no training request");
        };
        let digest = StoredRequest::new(&work("")).unwrap().digest();
        let requests = requests.into_iter().map(|(id, seq)| {
            let outcome = Outcome::Refused(seq.to_string());
            let answered = Answered { digest, outcome };
            queues.finish_training(&id, seq, &answered).unwrap();
            (id.number, seq)
        });
        requests.collect()
    }

    /// Adds a sampling session of the base model.
    fn sampler(queues: &Queues, session: &str) -> SamplerId {
        let record = SamplerRecord { model_path: None };
        queues.add_sampler(session, 0, record).unwrap()
    }

    fn promise(
        queues: &Queues,
        sampler: &SamplerId,
        seq: u64,
        temperature: f64,
    ) -> Result<RequestId, Refusal> {
        let weights = queues.sampler(sampler)?;
        queues.promise_samples(sampler, Some(seq), |_| SampleWork {
            weights,
            prompt: vec![1],
            num_samples: 1,
            seed: 1,
            max_new_tokens: 1,
            prompt_log_probs: None,
            sampling: SamplingConfig {
                temperature,
                ..SamplingConfig::default()
            },
        })
    }

    /// Limits for turns in which weights have no others.
    fn limits(samples: usize) -> TurnLimits {
        TurnLimits {
            samples,
            weights: 1,
            tokens: 0,
        }
    }

    /// Takes a turn of a sampling session.
    fn turn(queues: &Queues, max_samples: usize) -> SampleTurn {
        next(queues, limits(max_samples))
    }

    fn next(queues: &Queues, limits: TurnLimits) -> SampleTurn {
        match queues.next_turn(limits, Turns::All) {
            Some(Turn::Sample(turn)) => turn,
            _ => panic!("no request for samples"),
        }
    }

    fn numbers(turn: &SampleTurn) -> Vec<u64> {
        turn.requests.iter().map(|request| request.seq).collect()
    }

    /// Publishes a turn's results, and returns their numbers.
    fn finish(queues: &Queues, turn: &SampleTurn, text: &str) -> Vec<u64> {
        queues.fail_samples(turn, text);
        numbers(turn)
    }

    /// Returns a result's text.
    fn text(queues: &Queues, id: &RequestId) -> Option<String> {
        assert!(!queues.is_pending(id).unwrap());
        let outcome = queues.retrieve(id).unwrap()?;
        let (Outcome::Refused(text) | Outcome::Failed(text)) = &*outcome else {
            panic!("{outcome:?}");
        };
        Some(text.clone())
    }

    #[test]
    fn models_take_turns() {
        let (_folder, queues, session) = queues(9);
        for number in 0..2 {
            let id = model(&session, number);
            queues.add_model(&id, record()).unwrap();
            for seq in 0..2 {
                queues.promise(&id, Some(seq), &work("")).unwrap();
            }
        }
        let found = [(); 4].map(|()| train(&queues));
        assert_eq!(found, [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }

    /// A pass over rows with these lengths.
    fn pass(lengths: &[usize], backward: bool) -> Work {
        let row = |&length: &usize| TargetRow {
            tokens: vec![1; length],
            targets: vec![1; length],
            advantages: vec![1.; length],
            rollout_log_probs: None,
        };
        Work::Pass {
            rows: lengths.iter().map(row).collect(),
            loss: LossFn::CrossEntropy,
            backward,
        }
    }

    /// Short passes of other models join, within the limits, and each model keeps its turn.
    #[rstest]
    #[case(9, 999, vec![vec![0, 1, 5], vec![2], vec![3], vec![4], vec![6]])]
    #[case(2, 999, vec![vec![0, 1], vec![2], vec![3], vec![4], vec![5], vec![6]])]
    #[case(9, 7, vec![vec![0, 5], vec![1], vec![2], vec![3], vec![4], vec![6]])]
    #[case(9, 3, vec![vec![0], vec![1], vec![2], vec![3], vec![4], vec![5], vec![6]])]
    #[case(1, 999, vec![vec![0], vec![1], vec![2], vec![3], vec![4], vec![5], vec![6]])]
    fn models_share_passes(
        #[case] weights: usize,
        #[case] tokens: usize,
        #[case] expected: Vec<Vec<u64>>,
    ) {
        let (_folder, queues, session) = queues(9);
        let works = [
            pass(&[4], true),
            pass(&[3, 1], true),
            // Without a gradient, with single tokens, and no pass.
            pass(&[4], false),
            pass(&[1, 1], true),
            work(""),
            pass(&[2], true),
            // With too many tokens.
            pass(&[32, 1], true),
        ];
        for (number, work) in works.iter().enumerate() {
            let id = model(&session, number as u64);
            queues.add_model(&id, record()).unwrap();
            queues.promise(&id, Some(0), work).unwrap();
        }
        // Its first request is missing.
        let id = model(&session, 9);
        queues.add_model(&id, record()).unwrap();
        queues.promise(&id, Some(1), &works[0]).unwrap();
        let limits = TurnLimits {
            samples: 1,
            weights,
            tokens,
        };
        for expected in expected {
            let found = train_within(&queues, limits);
            let expected: Vec<(u64, u64)> = expected.into_iter().map(|n| (n, 0)).collect();
            assert_eq!(found, expected);
        }
        let state = queues.state();
        assert!(state.models.values().all(|model| !model.is_ready()));
    }

    /// A call that found its session may end after another one has finished it.
    #[test]
    fn a_finished_session_gets_nothing_new() {
        let (_folder, queues, session) = queues(9);
        queues.finish(&session).unwrap();
        let refused = queues.add_model(&model(&session, 0), record()).unwrap_err();
        assert_eq!(refused.status, 410);
        let sampler = SamplerRecord { model_path: None };
        let refused = queues.add_sampler(&session, 0, sampler).unwrap_err();
        assert_eq!(refused.status, 410);
    }

    #[test]
    fn another_request_cannot_take_the_number_of_one_that_waits() {
        let (_folder, queues, session) = queues(9);
        let id = model(&session, 0);
        queues.add_model(&id, record()).unwrap();
        let first = queues.promise(&id, Some(0), &work("")).unwrap();
        assert_eq!(queues.promise(&id, Some(0), &work("")).unwrap(), first);
        let refused = queues.promise(&id, Some(0), &work("other")).unwrap_err();
        let words =
            "seq_id: 0, must be the number of one request: another one of this model has it";
        assert_eq!((refused.status, refused.message.as_str()), (400, words));
    }

    /// Another promise would have no result.
    #[test]
    fn a_request_whose_result_was_dropped_is_refused() {
        let (_folder, queues, session) = queues(99);
        let id = model(&session, 0);
        queues.add_model(&id, record()).unwrap();
        let promises: Vec<RequestId> = (0..=KEPT_RESULTS as u64)
            .map(|seq| {
                let promise = queues.promise(&id, Some(seq), &work("")).unwrap();
                train(&queues);
                promise
            })
            .collect();
        for (seq, promise) in promises.iter().enumerate() {
            assert_eq!(text(&queues, promise), Some(seq.to_string()));
        }
        assert_eq!(text(&queues, &promises[0]), None);
        let refused = queues.promise(&id, Some(0), &work("")).unwrap_err();
        let words = "seq_id: 0, must be at least 65: this request's result was dropped";
        assert_eq!((refused.status, refused.message.as_str()), (400, words));
        assert_eq!(
            queues.promise(&id, Some(1), &work("")).unwrap(),
            promises[1]
        );
    }

    /// Retrieved results make room for later ones only after they were read.
    #[test]
    fn results_that_are_retrieved_at_the_same_time_are_all_found() {
        let (_folder, queues, session) = queues(999);
        let id = model(&session, 0);
        queues.add_model(&id, record()).unwrap();
        let promises: Vec<RequestId> = (0..512)
            .map(|seq| {
                let promise = queues.promise(&id, Some(seq), &work("")).unwrap();
                train(&queues);
                promise
            })
            .collect();
        let (queues, barrier) = (&queues, &std::sync::Barrier::new(128));
        thread::scope(|scope| {
            for promises in promises.chunks(4) {
                scope.spawn(move || {
                    barrier.wait();
                    for promise in promises {
                        assert!(queues.retrieve(promise).unwrap().is_some(), "{promise}");
                    }
                });
            }
        });
    }

    #[test]
    fn waiting_requests_for_samples_have_a_limit() {
        let (_folder, queues, session) = queues(2);
        let sampler = sampler(&queues, &session);
        let promise = |seq| promise(&queues, &sampler, seq, 1.);
        let promises = [0, 1].map(|seq| promise(seq).unwrap());
        let refused = promise(2).unwrap_err();
        assert_eq!(refused.status, 429, "{refused:?}");
        // A repeated request takes no place, and one that runs keeps its own.
        assert_eq!(promise(1).unwrap(), promises[1]);
        let begun = turn(&queues, 9);
        assert_eq!(promise(2).unwrap_err().status, 429);
        assert_eq!(finish(&queues, &begun, "a"), [0, 1]);
        assert_eq!(promise(1).unwrap(), promises[1]);
        promise(2).unwrap();
        assert_eq!(numbers(&turn(&queues, 9)), [2]);
        for promise in &promises {
            assert_eq!(text(&queues, promise).unwrap(), "a");
        }
    }

    /// The state in which a request is canceled.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Canceled {
        Waiting,
        Running,
        Done,
        Retrieved,
    }

    #[rstest]
    fn a_canceled_request_has_no_result_and_no_place(
        #[values(
            Canceled::Waiting,
            Canceled::Running,
            Canceled::Done,
            Canceled::Retrieved
        )]
        canceled: Canceled,
    ) {
        let (_folder, queues, session) = queues(1);
        let sampler = sampler(&queues, &session);
        let first = promise(&queues, &sampler, 0, 1.).unwrap();
        let begun = (canceled != Canceled::Waiting).then(|| turn(&queues, 9));
        if let Some(begun) = &begun {
            assert!(!queues.is_over(begun));
            if canceled != Canceled::Running {
                finish(&queues, begun, "a");
            }
        }
        if canceled == Canceled::Retrieved {
            assert_eq!(text(&queues, &first).unwrap(), "a");
        }
        let waits = queues.results();
        queues.cancel(&first);
        assert!(waits.has_changed().unwrap());
        if let Some(begun) = &begun {
            assert!(queues.is_over(begun));
            finish(&queues, begun, "late");
        }
        assert_eq!(text(&queues, &first), None);
        // The same number again is another request, which the turn before does not answer.
        assert_eq!(promise(&queues, &sampler, 0, 1.).unwrap(), first);
        if let Some(begun) = &begun {
            assert!(queues.is_over(begun));
            finish(&queues, begun, "late");
        }
        assert!(queues.is_pending(&first).unwrap());
        let again = turn(&queues, 9);
        assert!(!queues.is_over(&again));
        assert_eq!(finish(&queues, &again, "b"), [0]);
        assert_eq!(text(&queues, &first).unwrap(), "b");
    }

    /// Results, not numbers, have an age.
    #[test]
    fn the_oldest_result_that_nobody_retrieves_is_dropped() {
        let (_folder, queues, session) = queues(2);
        let sampler = sampler(&queues, &session);
        let promises = [5, 3, 4].map(|seq| {
            let promise = promise(&queues, &sampler, seq, 1.).unwrap();
            assert_eq!(finish(&queues, &turn(&queues, 9), "a"), [seq]);
            promise
        });
        let found = promises.map(|promise| text(&queues, &promise).is_some());
        assert_eq!(found, [false, true, true]);
    }

    /// A turn takes all equal requests that fit, and the others stay in their order.
    #[test]
    fn requests_that_alternate_share_turns() {
        let (_folder, queues, session) = queues(9);
        let sampler = sampler(&queues, &session);
        for seq in 0..8 {
            let temperature = if seq % 2 == 0 { 1. } else { 2. };
            promise(&queues, &sampler, seq, temperature).unwrap();
        }
        let turns = [(); 4].map(|()| numbers(&turn(&queues, 3)));
        assert_eq!(turns, [vec![0, 2, 4], vec![1, 3, 5], vec![6], vec![7]]);
    }

    /// Adds a sampling session of saved weights.
    fn sampler_of(queues: &Queues, session: &str, number: u64, weights: &str) -> SamplerId {
        let model_path = Some(weights.to_owned());
        let record = SamplerRecord { model_path };
        queues.add_sampler(session, number, record).unwrap()
    }

    /// Requests of other sampling sessions share a turn, from at most the given number of weights.
    #[rstest]
    #[case(9, 9, vec![vec![0, 1, 2, 3, 4]])]
    #[case(9, 2, vec![vec![0, 1, 2, 3], vec![4]])]
    #[case(9, 1, vec![vec![0, 1, 3], vec![2], vec![4]])]
    #[case(2, 9, vec![vec![0, 1], vec![2, 3], vec![4]])]
    fn sampling_sessions_share_turns(
        #[case] samples: usize,
        #[case] weights: usize,
        #[case] expected: Vec<Vec<u64>>,
    ) {
        let (_folder, queues, session) = queues(9);
        let names = ["a", "a", "b", "a", "c"];
        for (number, name) in names.into_iter().enumerate() {
            // The first session sends two requests.
            let number = number.saturating_sub(1) as u64;
            let sampler = sampler_of(&queues, &session, number, name);
            let seq = queues
                .state()
                .samplers
                .values()
                .map(|s| s.pending.len())
                .sum::<usize>();
            promise(&queues, &sampler, seq as u64, 1.).unwrap();
        }
        let limits = TurnLimits {
            samples,
            weights,
            tokens: 0,
        };
        for expected in expected {
            let turn = next(&queues, limits);
            assert_eq!(finish(&queues, &turn, "a"), expected);
        }
        assert!(
            queues
                .state()
                .samplers
                .values()
                .all(|s| s.waiting.is_empty())
        );
    }

    #[test]
    fn a_session_keeps_the_sampling_sessions_that_it_used_last() {
        let (folder, queues, session) = queues(9);
        let add = |queues: &Queues, number| sampler_of(queues, &session, number, "a");
        let is_kept = |queues: &Queues, number| {
            let file = format!("sessions/{session}/samplers/{number}.json");
            let kept = queues.sampler(&sampler_id(&session, number)).is_ok();
            assert_eq!(folder.path().join(file).exists(), kept, "{number}");
            kept
        };
        queues.store().add_session(&session).unwrap();
        // Another session has its own.
        let other = "1".repeat(32);
        queues.add_session(other.clone());
        let other = sampler_of(&queues, &other, 0, "a");
        let last = KEPT_SAMPLERS as u64;
        for number in 0..last {
            add(&queues, number);
        }
        // The first has a request, and the second was used.
        promise(&queues, &sampler_id(&session, 0), 0, 1.).unwrap();
        promise(&queues, &sampler_id(&session, 1), 0, 1.).unwrap();
        queues.cancel(&RequestId::Sample(sampler_id(&session, 1), 0));
        for number in last..last + 3 {
            add(&queues, number);
        }
        let kept = [0, 1, 2, 3, 4, 5, last + 2].map(|number| is_kept(&queues, number));
        assert_eq!(kept, [true, true, false, false, false, true, true]);
        assert!(queues.sampler(&other).is_ok());
        // One that exists needs no room.
        add(&queues, 0);
        assert!(is_kept(&queues, 5));
        let refused = queues.sampler(&sampler_id(&session, 2)).unwrap_err();
        assert_eq!(refused.status, 404);
        assert!(
            refused.message.contains("among the last 256"),
            "{refused:?}"
        );

        // A server that starts again continues.
        drop(queues);
        let queues = Queues::new(Store::open(folder.path()).unwrap(), 9).unwrap();
        add(&queues, last + 3);
        let kept = [0, 1, last + 3].map(|number| is_kept(&queues, number));
        assert_eq!(kept, [false, true, true]);
    }

    #[test]
    fn sampling_sessions_with_requests_are_not_removed() {
        let (_folder, queues, session) = queues(9);
        for number in 0..KEPT_SAMPLERS as u64 {
            let sampler = sampler_of(&queues, &session, number, "a");
            promise(&queues, &sampler, 0, 1.).unwrap();
        }
        let record = SamplerRecord { model_path: None };
        let number = KEPT_SAMPLERS as u64;
        let refused = queues
            .add_sampler(&session, number, record.clone())
            .unwrap_err();
        assert_eq!(refused.status, 429, "{refused:?}");
        queues.cancel(&RequestId::Sample(sampler_id(&session, 3), 0));
        queues.add_sampler(&session, number, record).unwrap();
        assert!(queues.sampler(&sampler_id(&session, 3)).is_err());
    }

    #[test]
    fn a_turn_is_divided_by_its_weights() {
        let (_folder, queues, session) = queues(9);
        for (number, name) in ["a", "b", "a"].into_iter().enumerate() {
            let sampler = sampler_of(&queues, &session, number as u64, name);
            promise(&queues, &sampler, number as u64, 1.).unwrap();
        }
        let limits = TurnLimits {
            weights: 9,
            ..limits(9)
        };
        let mut turn = next(&queues, limits);
        queues.cancel(&RequestId::Sample(sampler_id(&session, 0), 0));
        assert!(!queues.is_over(&turn));
        queues.keep_pending(&mut turn);
        let turns = turn.by_weights();
        let found: Vec<Vec<u64>> = turns.iter().map(numbers).collect();
        assert_eq!(found, [[1], [2]]);
        for turn in &turns {
            assert!(!queues.is_over(turn));
            finish(&queues, turn, "a");
            assert!(queues.is_over(turn));
        }
    }

    /// A queue with many requests has one turn, and then the others have theirs.
    #[test]
    fn a_long_queue_takes_turns_with_others() {
        let (_folder, queues, session) = queues(9);
        let long = sampler(&queues, &session);
        let record = SamplerRecord { model_path: None };
        let other = queues.add_sampler(&session, 1, record).unwrap();
        for seq in 0..3 {
            promise(&queues, &long, seq, 1.).unwrap();
        }
        promise(&queues, &other, 7, 1.).unwrap();
        let turns = [(); 4].map(|()| numbers(&turn(&queues, 1)));
        assert_eq!(turns, [[0], [7], [1], [2]]);
    }
}
