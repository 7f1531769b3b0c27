//! An agent's requests and reports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_grpo_base::clock::running_time;
use candle_grpo_base::server::Key;
use candle_grpo_train::environment::{AgentConfig, OWN_METRICS};
use serde_json::Value;
use tokio::sync::watch;

use crate::bell::Bell;
use crate::request::{Outcome, Refusal, Request};

/// The server's side of an episode. The sampling thread has its tokens.
#[derive(Debug)]
pub(crate) struct Episode {
    pub(crate) id: String,
    pub(crate) key: Key,
    /// The prompt's dataset row.
    pub(crate) row: Value,
    /// The roles that requests name as their model; empty: they may name any model.
    pub(crate) roles: Vec<String>,
    max_requests: usize,
    takes_rewards: bool,
    bell: Arc<Bell>,
    state: Mutex<State>,
}

/// An agent's report so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    /// Latest value; null is `Some(None)`.
    pub(crate) reward: Option<Option<f64>>,
    /// Latest text.
    pub(crate) feedback: Option<String>,
    /// Latest value for each role that has one.
    pub(crate) role_rewards: BTreeMap<String, f64>,
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) is_done: bool,
}

#[derive(Debug)]
struct State {
    report: Report,
    slots: Vec<Slot>,
    /// Number of requests, including refused ones.
    received: usize,
    /// Reason why the episode failed.
    failure: Option<String>,
    is_closed: bool,
    /// Time at the last request or answer; absent before an agent has the episode.
    active: Option<Duration>,
    /// The worker that has the episode.
    worker: usize,
}

/// A request for an answer.
#[derive(Debug)]
struct Slot {
    /// Digest over the path and the body.
    digest: [u8; 32],
    idempotency_key: Option<String>,
    request: Arc<Request>,
    outcome: watch::Sender<Option<Outcome>>,
    is_delivered: bool,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    /// Being sampled.
    Taken,
    Answered,
    /// Its client left before it was sampled.
    Dropped,
}

/// A request's identity, which detects retries.
pub(crate) struct Identity {
    pub(crate) digest: [u8; 32],
    pub(crate) idempotency_key: Option<String>,
    /// True if the client marks it as a retry.
    pub(crate) is_repeated: bool,
}

impl Episode {
    /// Opens an episode of the agents of `config`.
    pub(crate) fn new(id: String, row: Value, config: &AgentConfig, bell: Arc<Bell>) -> Self {
        let state = State {
            report: Report::default(),
            slots: Vec::new(),
            received: 0,
            failure: None,
            is_closed: false,
            active: None,
            worker: 0,
        };
        Self {
            id,
            key: Key::random(),
            row,
            roles: config.roles.clone(),
            max_requests: config.max_requests,
            takes_rewards: config.reports_rewards,
            bell,
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an agent, with this worker's number, has the episode, which starts its clock.
    pub(crate) fn begin(&self, worker: usize) {
        let mut state = self.state();
        state.active = Some(running_time());
        state.worker = worker;
    }

    /// Returns whether this worker has the episode.
    pub(crate) fn is_with(&self, worker: usize) -> bool {
        let state = self.state();
        state.active.is_some() && state.worker == worker
    }

    /// Records why the episode failed.
    pub(crate) fn fail(&self, message: String) {
        self.state().failure.get_or_insert(message);
    }

    /// Returns the role that a request for this model plays, if there are roles.
    pub(crate) fn role(&self, model: &str) -> Result<Option<String>, Refusal> {
        if self.roles.is_empty() {
            return Ok(None);
        }
        self.ensure_role("model", model)?;
        Ok(Some(model.to_owned()))
    }

    fn ensure_role(&self, field: &str, role: &str) -> Result<(), Refusal> {
        if self.roles.iter().any(|known| known == role) {
            return Ok(());
        }
        let must = match self.roles.as_slice() {
            [] => "be absent: the run has no roles (environment.roles)".to_owned(),
            roles => format!("be one of environment.roles: {}", roles.join(", ")),
        };
        Err(Refusal::invalid(field, format!("{role:?}"), &must))
    }

    /// Counts a request.
    pub(crate) fn count(&self) -> Result<(), Refusal> {
        let mut state = self.state();
        state.ensure_open()?;
        state.received += 1;
        state.active = Some(running_time());
        if state.received > self.max_requests {
            let message = format!(
                "sent more than {} requests, max_requests",
                self.max_requests
            );
            state.failure.get_or_insert(message.clone());
            self.bell.ring();
            return Err(Refusal::new(410, "limit_reached", message));
        }
        Ok(())
    }

    /// Returns a request's position and its future outcome. A repeated request shares those of the
    /// first.
    pub(crate) fn ask(
        &self,
        identity: Identity,
        request: Request,
    ) -> Result<(usize, watch::Receiver<Option<Outcome>>), Refusal> {
        let mut state = self.state();
        state.ensure_open()?;
        if let Some(place) = state.repeated(&identity)? {
            return Ok((place, state.slots[place].outcome.subscribe()));
        }
        let (outcome, receiver) = watch::channel(None);
        state.slots.push(Slot {
            digest: identity.digest,
            idempotency_key: identity.idempotency_key,
            request: Arc::new(request),
            outcome,
            is_delivered: false,
            stage: Stage::Waiting,
        });
        self.bell.ring();
        Ok((state.slots.len() - 1, receiver))
    }

    /// Takes the waiting requests with their positions. Drops those whose clients have left.
    pub(crate) fn take_waiting(&self) -> Vec<(usize, Arc<Request>)> {
        let mut state = self.state();
        let slots = state.slots.iter_mut().enumerate();
        let mut taken = Vec::new();
        for (place, slot) in slots.filter(|(_, slot)| slot.stage == Stage::Waiting) {
            slot.stage = match slot.outcome.receiver_count() {
                0 => Stage::Dropped,
                _ => {
                    taken.push((place, Arc::clone(&slot.request)));
                    Stage::Taken
                }
            };
        }
        taken
    }

    /// Answers a request.
    pub(crate) fn answer(&self, place: usize, outcome: Outcome) {
        let mut state = self.state();
        state.active = Some(running_time());
        if let Some(slot) = state.slots.get_mut(place) {
            slot.stage = Stage::Answered;
            slot.outcome.send_replace(Some(outcome));
        }
    }

    /// Records that the client has received the answer.
    pub(crate) fn delivered(&self, place: usize) {
        if let Some(slot) = self.state().slots.get_mut(place) {
            slot.is_delivered = true;
        }
    }

    /// Accepts a report.
    pub(crate) fn report(&self, body: &Value) -> Result<(), Refusal> {
        let Value::Object(fields) = body else {
            return Err(Refusal::invalid("body", body, "be a JSON object"));
        };
        let role = match fields.get("role") {
            None => None,
            Some(role) => {
                let name = role.as_str();
                let name = name.ok_or_else(|| Refusal::invalid("role", role, "be a text"))?;
                self.ensure_role("role", name)?;
                if !fields.get("value").is_some_and(Value::is_number) {
                    let value = fields.get("value").unwrap_or(&Value::Null);
                    return Err(Refusal::invalid("value", value, "be a number with a role"));
                }
                Some(name)
            }
        };
        let mut next = self.state().report.clone();
        for (name, value) in fields {
            match name.as_str() {
                "role" => {}
                "feedback" if value.is_null() => next.feedback = None,
                "feedback" => {
                    let text = value.as_str();
                    let text =
                        text.ok_or_else(|| Refusal::invalid(name, value, "be a text or null"))?;
                    next.feedback = Some(text.to_owned());
                }
                "value" if value.is_null() => next.reward = Some(None),
                "value" => {
                    let number = value.as_f64().filter(|x| (*x as f32).is_finite());
                    let must = "be a finite f32, or null";
                    let number = number.ok_or_else(|| Refusal::invalid(name, value, must))?;
                    if !self.takes_rewards {
                        let must = "be null or absent: the run has rewards (reports_rewards)";
                        return Err(Refusal::invalid(name, value, must));
                    }
                    match role {
                        Some(role) => {
                            next.role_rewards.insert(role.to_owned(), number);
                        }
                        None => next.reward = Some(Some(number)),
                    }
                }
                "done" => {
                    let done = value.as_bool();
                    next.is_done =
                        done.ok_or_else(|| Refusal::invalid(name, value, "be true or false"))?;
                }
                "metrics" => {
                    let metrics = value.as_object();
                    let must = "be an object of numbers";
                    let metrics = metrics.ok_or_else(|| Refusal::invalid(name, value, must))?;
                    for (name, value) in metrics {
                        let path = format!("metrics.{name}");
                        let number = value.as_f64().filter(|x| x.is_finite());
                        let number = number
                            .ok_or_else(|| Refusal::invalid(&path, value, "be a finite number"))?;
                        if RESERVED.iter().chain(&OWN_METRICS).any(|own| own == name) {
                            let must = "have another name, this one is reserved";
                            return Err(Refusal::invalid(&path, value, must));
                        }
                        next.metrics.insert(name.clone(), number);
                    }
                }
                _ => {
                    let must = "be absent: the fields are value, role, feedback, done and metrics";
                    return Err(Refusal::invalid(name, value, must));
                }
            }
        }
        let mut state = self.state();
        state.ensure_open()?;
        state.report = next;
        self.bell.ring();
        Ok(())
    }

    /// Returns the report so far, and the reason why the episode failed.
    pub(crate) fn so_far(&self) -> (Report, Option<String>) {
        let state = self.state();
        (state.report.clone(), state.failure.clone())
    }

    /// Returns the number of requests so far.
    pub(crate) fn received(&self) -> usize {
        self.state().received
    }

    /// Returns the time since the agent last sent a request or received an answer. `None` before it
    /// has the episode, and while it waits for an answer.
    pub(crate) fn idle(&self) -> Option<Duration> {
        let state = self.state();
        let waits = |slot: &Slot| matches!(slot.stage, Stage::Waiting | Stage::Taken);
        let active = state.active.filter(|_| !state.slots.iter().any(waits));
        active.map(|active| running_time().saturating_sub(active))
    }

    /// Ends the episode for its agent, and returns its report.
    pub(crate) fn close(&self) -> Report {
        let mut state = self.state();
        state.is_closed = true;
        for slot in &mut state.slots {
            if matches!(slot.stage, Stage::Waiting | Stage::Taken) {
                slot.stage = Stage::Answered;
                slot.outcome.send_replace(Some(Err(ended())));
            }
        }
        state.report.clone()
    }
}

/// Metric names that the server itself uses.
const RESERVED: [&str; 3] = ["answers", "rows", "requests"];

fn ended() -> Refusal {
    Refusal::new(410, "episode_ended", "the episode has ended")
}

impl State {
    fn ensure_open(&self) -> Result<(), Refusal> {
        if self.is_closed || self.report.is_done || self.failure.is_some() {
            Err(ended())
        } else {
            Ok(())
        }
    }

    /// Returns the position of the request that this one repeats.
    fn repeated(&self, identity: &Identity) -> Result<Option<usize>, Refusal> {
        let answers = |slot: &Slot| {
            let is_refused = matches!(&*slot.outcome.borrow(), Some(Err(_)));
            slot.stage != Stage::Dropped && !is_refused
        };
        let slots = self.slots.iter().enumerate();
        for (place, slot) in slots.rev().filter(|(_, slot)| answers(slot)) {
            let is_equal = slot.digest == identity.digest;
            let key = identity.idempotency_key.as_ref();
            if key.is_some() && key == slot.idempotency_key.as_ref() {
                if !is_equal {
                    let message = "Idempotency-Key: used before for another request";
                    return Err(Refusal::new(409, "idempotency_key_reused", message));
                }
                return Ok(Some(place));
            }
            let is_lost = !slot.is_delivered && slot.outcome.receiver_count() == 0;
            if key.is_none() && is_equal && (identity.is_repeated || is_lost) {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }
}
