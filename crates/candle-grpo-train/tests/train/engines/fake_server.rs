//! Parts that all fake servers share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use candle_grpo_test_support::{HttpServer, Reply, Request};
use serde_json::{Value, json};

use super::ipc_worker::IpcWorker;
use super::served_policy::{Draw, Drawn, ServedPolicy};
use super::workers::Workers;

/// A server with the tiny policy that answers as an engine does.
pub(crate) struct FakeServer {
    pub(crate) http: HttpServer,
    shared: Arc<Shared>,
}

/// An engine's answers.
pub(crate) type Answer = fn(&Shared, &Request) -> Reply;

/// A fault in one request.
pub(crate) enum Fault {
    /// The engine does not see the request.
    Instead(Reply),
    /// The engine answers, and its answer is changed.
    After(Box<dyn FnOnce(Reply) -> Reply + Send>),
}

impl Fault {
    /// Holds the answer until the server releases it.
    pub(crate) fn held() -> Self {
        Self::After(Box::new(Reply::held))
    }

    /// Changes an answer's JSON.
    pub(crate) fn json(change: impl FnOnce(&mut Value) + Send + 'static) -> Self {
        Self::After(Box::new(move |reply| {
            let mut value: Value = serde_json::from_slice(reply.body()).unwrap_or_default();
            change(&mut value);
            Reply::new(reply.status(), value.to_string())
        }))
    }
}

type WaitsAfter = Box<dyn Fn(&Draw) -> Option<usize> + Send>;

type Faults = Box<dyn FnMut(&Request) -> Option<Fault> + Send>;

/// Server state.
pub(crate) struct Shared {
    engine: Mutex<Engine>,
    /// Notified when the engine resumes or closes.
    resumed: Condvar,
    faults: Mutex<Faults>,
    answer: Answer,
    closing: AtomicBool,
}

/// Engine state.
pub(crate) struct Engine {
    pub(crate) policy: ServedPolicy,
    /// The version that a client announced.
    pub(crate) version: String,
    pub(crate) paused: bool,
    /// A reload failed: the next completion ends the engine.
    pub(crate) broken: bool,
    /// The engine has ended: requests have no answer.
    pub(crate) dead: bool,
    /// The key that requests need.
    pub(crate) api_key: Option<String>,
    /// Returns the number of tokens after which a request waits for an abort, if it has as many.
    pub(crate) waits_after: WaitsAfter,
    /// Number of times that a client has aborted all requests.
    pub(crate) aborts: usize,
    /// The processes that can receive weights.
    pub(crate) workers: Option<Workers>,
    /// The process that can read weights from memory of the policy.
    pub(crate) ipc: Option<IpcWorker>,
    /// True between the start and the end of a weight update.
    pub(crate) updating: bool,
    /// The parts that the engine has given up, if it can sleep.
    pub(crate) sleep: Option<Sleep>,
}

/// The parts that an engine has given up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sleep {
    /// The memory of the weights.
    pub(crate) weights: bool,
    /// The memory of keys and values.
    pub(crate) cache: bool,
    /// The weights themselves.
    pub(crate) lost: bool,
}

impl Sleep {
    /// True if the engine can sample.
    pub(crate) fn is_awake(self) -> bool {
        self == Self::default()
    }
}

impl FakeServer {
    pub(super) fn start(answer: Answer, policy: ServedPolicy) -> Self {
        let shared = Arc::new(Shared {
            engine: Mutex::new(Engine {
                policy,
                version: "default".to_owned(),
                paused: false,
                broken: false,
                dead: false,
                api_key: None,
                waits_after: Box::new(|_| None),
                aborts: 0,
                workers: None,
                ipc: None,
                updating: false,
                sleep: None,
            }),
            resumed: Condvar::new(),
            faults: Mutex::new(Box::new(|_| None)),
            answer,
            closing: AtomicBool::new(false),
        });
        let http = HttpServer::start({
            let shared = Arc::clone(&shared);
            move |request| shared.reply(request)
        });
        Self { http, shared }
    }

    pub(crate) fn url(&self) -> String {
        self.http.url()
    }

    /// Returns the engine's state.
    pub(crate) fn engine(&self) -> MutexGuard<'_, Engine> {
        self.shared.engine()
    }

    /// Asks `faults` at each request for its fault.
    pub(crate) fn set_faults(
        &self,
        faults: impl FnMut(&Request) -> Option<Fault> + Send + 'static,
    ) {
        *lock(&self.shared.faults) = Box::new(faults);
    }

    /// Restarts the program: connections close, and weights, adapters, version and pause return to
    /// their initial values.
    pub(crate) fn restart(&self) {
        self.http.stop();
        let mut engine = self.engine();
        engine.policy.restart();
        engine.version = "default".to_owned();
        (engine.paused, engine.broken, engine.dead) = (false, false, false);
        engine.updating = false;
        if let Some(workers) = &mut engine.workers {
            workers.restart();
        }
        if let Some(worker) = &engine.ipc {
            worker.restart();
        }
        engine.sleep = engine.sleep.map(|_| Sleep::default());
        drop(engine);
        self.shared.resumed.notify_all();
        self.http.restart();
    }

    /// Number of requests to a path.
    pub(crate) fn count(&self, path: &str) -> usize {
        let requests = self.http.requests();
        requests.iter().filter(|r| r.path() == path).count()
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        // The lock orders the notification after the check by a thread that is about to wait.
        drop(self.shared.engine());
        self.shared.resumed.notify_all();
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn engine(&self) -> MutexGuard<'_, Engine> {
        lock(&self.engine)
    }

    fn reply(&self, request: &Request) -> Reply {
        let fault = (*lock(&self.faults))(request);
        match fault {
            Some(Fault::Instead(reply)) => reply,
            Some(Fault::After(change)) => change(self.answer(request)),
            None => self.answer(request),
        }
    }

    fn answer(&self, request: &Request) -> Reply {
        if self.engine().dead {
            return Reply::closed();
        }
        (self.answer)(self, request)
    }

    /// The end-of-text token.
    pub(super) fn end(&self) -> u32 {
        self.engine().policy.served.end
    }

    /// Pauses the engine, or resumes it.
    pub(super) fn set_paused(&self, paused: bool) {
        self.engine().paused = paused;
        self.resumed.notify_all();
    }

    /// Ends the requests that wait for it.
    pub(super) fn abort_all(&self) {
        self.engine().aborts += 1;
        self.resumed.notify_all();
    }

    /// Returns true if the request has the server's key.
    pub(super) fn is_authorized(&self, request: &Request) -> bool {
        let engine = self.engine();
        engine.api_key.as_ref().is_none_or(|key| {
            let sent = request.header("authorization");
            sent.and_then(|sent| sent.strip_prefix("Bearer ")) == Some(key)
        })
    }

    /// Log-probs over the vocabulary at temperature 1, at each prompt position. The first position
    /// has none.
    pub(super) fn score(&self, prompt: &[u32]) -> Result<Vec<Option<Vec<f32>>>, String> {
        let engine = self.engine();
        let weights = engine.policy.weights(None).ok_or("no weights")?;
        let drawing = engine.policy.drawing(weights);
        drop(engine);
        let scored = drawing.score(prompt).map_err(|e| format!("{e:#}"))?;
        Ok([None]
            .into_iter()
            .chain(scored.into_iter().map(Some))
            .collect())
    }

    /// Tokens with the `k` largest log-probs at a position, the largest first.
    pub(super) fn best(log_probs: &[f32], k: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..log_probs.len() as u32).collect();
        order.sort_by(|&a, &b| log_probs[b as usize].total_cmp(&log_probs[a as usize]));
        order.truncate(k);
        order
    }

    /// Samples completions after a pause ends. `adapter` selects the policy with that adapter.
    /// `None` if the engine ends.
    ///
    /// # Errors
    ///
    /// Fails with the answer's status and message.
    pub(super) fn draw(
        &self,
        adapter: Option<&str>,
        draw: &Draw,
    ) -> Result<Option<Vec<Drawn>>, (u16, String)> {
        let mut engine = self.engine();
        // A real engine would wait until it is awake.
        if engine.sleep.is_some_and(|sleep| !sleep.is_awake()) {
            return Err((500, format!("a completion while {:?}", engine.sleep)));
        }
        while engine.paused && !self.closing.load(Ordering::Acquire) {
            engine = self.resumed.wait(engine).unwrap();
        }
        let Some(weights) = engine.policy.weights(adapter) else {
            let name = adapter.unwrap_or_default();
            return Err((404, format!("The model `{name}` does not exist.")));
        };
        engine
            .policy
            .check(draw)
            .map_err(|e| (400, format!("{e:#}")))?;
        if engine.broken {
            engine.dead = true;
            return Ok(None);
        }
        let drawing = engine.policy.drawing(weights);
        let (waits_after, aborts) = ((engine.waits_after)(draw), engine.aborts);
        drop(engine);
        let mut drawn = drawing.draw(draw).map_err(|e| (500, format!("{e:#}")))?;
        if let Some(length) = waits_after
            && drawn.iter().any(|drawn| drawn.tokens.len() >= length)
        {
            let mut engine = self.engine();
            while engine.aborts == aborts && !self.closing.load(Ordering::Acquire) {
                engine = self.resumed.wait(engine).unwrap();
            }
            drawn.iter_mut().for_each(|drawn| drawn.abort(length));
        }
        Ok(Some(drawn))
    }
}

/// JSON answer.
pub(super) fn ok(value: Value) -> Reply {
    Reply::new(200, value.to_string())
}

/// The answer to a path that a server does not have.
pub(super) fn not_found() -> Reply {
    Reply::new(404, json!({"detail": "Not Found"}).to_string())
}

/// Reads a request field.
///
/// # Errors
///
/// Fails if the field has another type.
pub(super) fn field<T: serde::de::DeserializeOwned>(
    body: &Value,
    name: &str,
) -> Result<Option<T>, String> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|e| format!("{name}: {value}: {e}")),
    }
}

/// Returns the body in a request that loads an adapter, with the adapter's name and directory. The
/// body has no other fields than these and `others`.
pub(super) fn adapter_to_load(
    body: &[u8],
    others: &[&str],
) -> Result<(Value, String, String), String> {
    let body = object(body, &[&["lora_name", "lora_path"], others].concat())?;
    let text = |name: &str| field(&body, name)?.ok_or_else(|| format!("{name}: missing"));
    let (name, folder) = (text("lora_name")?, text("lora_path")?);
    Ok((body, name, folder))
}

/// A request's JSON, whose fields must all be among `known`.
pub(super) fn object(body: &[u8], known: &[&str]) -> Result<Value, String> {
    let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let Value::Object(fields) = &value else {
        return Err("the body must be an object".to_owned());
    };
    match fields.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(format!("{key}: extra inputs are not permitted")),
        None => Ok(value),
    }
}
