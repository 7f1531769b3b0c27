//! The interface to one kind of server.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use candle_grpo_base::json;
use serde_json::Value;

use super::transfer::Transfer;
use super::vllm_ipc::Sharing;
use super::weights::{EngineWeights, WeightFormat};
use crate::SamplingConfig;
use crate::excerpt::excerpt;
use candle_grpo_hub::http::{JsonClient, Limits, RequestFailure};

/// Maximum answer length in bytes, apart from the part that depends on the sequence length.
const MAX_ANSWER: u64 = 1 << 24;
/// Maximum answer length per token: its id, its text and its log-prob.
const MAX_TOKEN: u64 = 1 << 10;
/// Maximum wait for the answer to a request that a server answers at once.
const BRIEF: Duration = Duration::from_secs(20);
/// Maximum number of characters that an error quotes from an answer.
const SHOWN: usize = 80;

/// Requests and answers for one kind of server. The methods may be called from several threads.
///
/// To sample with it, call
/// [`ServerGenerator::with_protocol`](super::ServerGenerator::with_protocol).
///
/// # Examples
///
/// A server that takes token ids at `/generate`, and reads weights at `/load`:
///
/// ```
/// use candle_grpo_train::rollout::engine::{
///     Call, DrawRequest, Drawn, End, EngineWeights, Failure, Protocol, ServedModel, Server,
/// };
/// use serde::Deserialize;
/// use serde_json::{Value, json};
///
/// struct Generate;
///
/// impl Protocol for Generate {
///     fn describe(&self, server: &Server, _name: Option<&str>) -> Result<ServedModel, Failure> {
///         let answer = server.call(&Call::get("/model"))?;
///         let absent = || Failure::Malformed("name: absent (/model)".to_owned());
///         let name = answer["name"].as_str().ok_or_else(absent)?.to_owned();
///         Ok(ServedModel { name, max_model_len: None })
///     }
///
///     fn draw(&self, request: &DrawRequest) -> Call {
///         let body = json!({
///             "ids": request.prompt,
///             "max_new_tokens": request.max_new_tokens,
///             "temperature": request.temperature(),
///             "top_p": request.sampling.top_p,
///             "stop_ids": request.sampling.stop_token_ids,
///             "seed": request.seed,
///         });
///         Call::post("/generate", body)
///     }
///
///     fn parse(&self, answer: &Value) -> Result<Drawn, Failure> {
///         #[derive(Deserialize)]
///         struct Answer {
///             ids: Vec<u32>,
///             log_probs: Vec<f32>,
///             stopped: bool,
///         }
///         let answer = Answer::deserialize(answer).map_err(|e| Failure::Malformed(e.to_string()))?;
///         Ok(Drawn {
///             tokens: answer.ids,
///             log_probs: answer.log_probs,
///             end: if answer.stopped { End::StopToken } else { End::Length },
///             weight_version: None,
///         })
///     }
///
///     fn load(&self, server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
///         let body = json!({"path": weights.path, "version": weights.name()});
///         server.call(&Call::post("/load", body)).map(drop)
///     }
///
///     fn serves(&self, server: &Server, weights: &EngineWeights) -> Result<bool, Failure> {
///         Ok(server.call(&Call::get("/model"))?["version"] == weights.name())
///     }
/// }
///
/// let answer = json!({"ids": [5, 2], "log_probs": [-0.5, -0.1], "stopped": true});
/// let drawn = Generate.parse(&answer).expect("a whole answer");
/// assert_eq!((drawn.tokens, drawn.end), (vec![5, 2], End::StopToken));
/// assert!(Generate.parse(&json!({"ids": [5, 2]})).is_err());
/// ```
pub trait Protocol: Send + Sync {
    /// Returns the request that a server answers with status 2xx as soon as it can sample.
    fn health(&self) -> Call {
        Call::get("/health")
    }

    /// Requests which model the server serves.
    ///
    /// # Errors
    ///
    /// Fails if the server does not answer, or has no such model.
    fn describe(&self, server: &Server, name: Option<&str>) -> Result<ServedModel, Failure>;

    /// Returns the request that samples a completion.
    fn draw(&self, request: &DrawRequest) -> Call;

    /// Returns whether [`Self::draw`] passes on [`SamplingConfig::structured_outputs`]. By default,
    /// it does not, and a completion with them is an error.
    fn structures_outputs(&self) -> bool {
        false
    }

    /// Parses the answer to [`Self::draw`].
    ///
    /// # Errors
    ///
    /// [`Failure::Malformed`] if the answer lacks tokens or log-probs.
    fn parse(&self, answer: &Value) -> Result<Drawn, Failure>;

    /// Requests log-probs at temperature 1 for given tokens: `tokens[first..]`, each after the
    /// tokens before it, and for the most likely tokens there. By default, servers do not support
    /// this.
    ///
    /// # Errors
    ///
    /// [`Failure::Unsupported`] if this kind of server cannot do it. Also fails if the server does
    /// not answer, or reports other tokens.
    fn score(&self, server: &Server, request: &ScoreRequest<'_>) -> Result<Vec<Scored>, Failure> {
        let _ = (server, request);
        let message = "servers of this kind name no log-probs of given tokens";
        Err(Failure::Unsupported(message.to_owned()))
    }

    /// Loads weights into the server, and checks that it serves them.
    ///
    /// # Errors
    ///
    /// Fails if a request fails, or if the server reports another version afterward.
    fn load(&self, server: &Server, weights: &EngineWeights) -> Result<(), Failure>;

    /// Unloads an adapter by its name. It is no error if the server does not have it. By default,
    /// adapters stay in the server.
    ///
    /// # Errors
    ///
    /// Fails if the server refuses it, or does not answer.
    fn unload(&self, server: &Server, adapter: &str) -> Result<(), Failure> {
        let _ = (server, adapter);
        Ok(())
    }

    /// Connects to the server's processes, which then receive weights in `format`:
    /// [`WeightFormat::Memory`] or [`WeightFormat::SharedMemory`]. Called once the server is
    /// healthy, to find out whether it can. By default, servers load weights from a directory only.
    ///
    /// # Errors
    ///
    /// [`Failure::Unsupported`] if this kind of server cannot do it. Also fails if the server does
    /// not answer, or if its processes do not connect in time.
    fn join(&self, server: &Server, format: WeightFormat) -> Result<(), Failure> {
        let _ = (server, format);
        let message = "servers of this kind load weights from a directory only";
        Err(Failure::Unsupported(message.to_owned()))
    }

    /// Ends the connection to a server that has received weights from memory. The server is not
    /// waited for any longer than for a health check, and a failure is no error. By default,
    /// nothing is sent.
    fn leave(&self, server: &Server) {
        let _ = server;
    }

    /// Lets the server give up the memory of its weights and of its keys and values. No completion
    /// is sampled before it has [woken](Self::wake) and has weights again. Also called for a server
    /// that sleeps. By default, servers do not sleep.
    ///
    /// # Errors
    ///
    /// [`Failure::Unsupported`] if this kind of server cannot do it. Also fails if the server does
    /// not answer.
    fn sleep(&self, server: &Server) -> Result<(), Failure> {
        let _ = server;
        let message = "servers of this kind do not sleep";
        Err(Failure::Unsupported(message.to_owned()))
    }

    /// Lets a sleeping server take memory for the weights, before [`Self::load`], or for keys and
    /// values, after it. Also called for a server that is awake, in which nothing changes.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::sleep`], and if the server has no memory or does not wake
    /// up.
    fn wake(&self, server: &Server, part: Part) -> Result<(), Failure> {
        let _ = (server, part);
        let message = "servers of this kind do not sleep";
        Err(Failure::Unsupported(message.to_owned()))
    }

    /// Requests the SHA-256 checksums of the bytes of the server's weights, by their names. A
    /// weight has several if the server's processes have different parts of it. Called after
    /// [`Self::load`] with [`RolloutConfig::check_weights`]. By default, servers do not support
    /// this.
    ///
    /// [`RolloutConfig::check_weights`]: crate::rollout::RolloutConfig::check_weights
    ///
    /// # Errors
    ///
    /// [`Failure::Unsupported`] if this kind of server cannot do it. Also fails if the server does
    /// not answer.
    fn checksums(&self, server: &Server) -> Result<Checksums, Failure> {
        let _ = server;
        let message = "servers of this kind name no checksums of their weights";
        Err(Failure::Unsupported(message.to_owned()))
    }

    /// Ends the requests that sample completions. Each is answered with its tokens so far, as
    /// [`End::Aborted`]. Called again until all are answered, because one may have just been sent.
    /// By default, they run to their end.
    ///
    /// # Errors
    ///
    /// Fails if the server does not support it, or does not answer.
    fn interrupt(&self, server: &Server) -> Result<(), Failure> {
        let _ = server;
        Ok(())
    }

    /// Returns whether the server still serves `weights`. Called after each completion, unless the
    /// answer reports the version or the request names the adapter.
    ///
    /// # Errors
    ///
    /// Fails if the server does not answer.
    fn serves(&self, server: &Server, weights: &EngineWeights) -> Result<bool, Failure>;
}

/// A part of a server's memory that it gives up while it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The weights.
    Weights,
    /// Keys and values. A server with both parts is awake.
    Cache,
}

/// SHA-256 checksums in hexadecimal digits, by the name of the weight.
pub type Checksums = BTreeMap<String, BTreeSet<String>>;

/// A request: GET without a body, POST with one.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Path and query, from the slash on.
    pub path: String,
    /// JSON body.
    pub body: Option<Value>,
}

impl Call {
    /// Creates a GET request.
    pub fn get(path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            body: None,
        }
    }

    /// Creates a POST request.
    pub fn post(path: impl Into<String>, body: Value) -> Self {
        Self {
            path: path.into(),
            body: Some(body),
        }
    }
}

/// A server's model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedModel {
    /// The name for requests.
    pub name: String,
    /// Maximum number of tokens in a prompt and its completion, if the server reports it.
    pub max_model_len: Option<usize>,
}

/// A completion to sample.
#[derive(Debug, Clone)]
pub struct DrawRequest {
    /// The model's name, or the name of the adapter that is the policy.
    pub model: String,
    /// True if [`Self::model`] is an adapter.
    pub is_adapter: bool,
    /// The tokens to continue.
    pub prompt: Vec<u32>,
    /// Maximum length in tokens.
    pub max_new_tokens: usize,
    /// The completion's seed.
    pub seed: u64,
    /// The distribution to sample from, and the tokens and strings that end the completion.
    pub sampling: Arc<SamplingConfig>,
    /// False if [`Drawn::log_probs`] is not read.
    pub log_probs: bool,
}

impl DrawRequest {
    /// Returns the temperature to send: 0 for greedy decoding.
    pub fn temperature(&self) -> f64 {
        if self.sampling.greedy {
            0.
        } else {
            self.sampling.temperature
        }
    }
}

/// A sequence whose tokens are scored.
#[derive(Debug, Clone)]
pub struct ScoreRequest<'a> {
    /// The model's name.
    pub model: String,
    /// The sequence's tokens.
    pub tokens: &'a [u32],
    /// Index of the first token to score, at least 1.
    pub first: usize,
    /// Length of [`Scored::best`].
    pub best: usize,
}

/// Log-probs at a token's place.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The token's log-prob.
    pub log_prob: f32,
    /// The most likely tokens there with their log-probs, most likely first.
    pub best: Vec<(u32, f32)>,
}

impl ScoreRequest<'_> {
    /// Returns the number of tokens in an answer: the sequence's, each with the most likely ones.
    pub(super) fn num_named(&self) -> usize {
        self.tokens
            .len()
            .saturating_mul(self.best.saturating_add(1))
    }

    /// Parses an answer's list `named`, which has one entry per token. `read` parses an entry, and
    /// returns `None` if it belongs to another token.
    ///
    /// # Errors
    ///
    /// [`Failure::Malformed`] with the list's `field`, if the list has other tokens.
    pub(super) fn read<T>(
        &self,
        field: &str,
        named: &Value,
        read: impl Fn(u32, &Value) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let named = named.as_array().map_or(&[][..], Vec::as_slice);
        let pairs = self.tokens.iter().zip(named).skip(self.first);
        let entries: Option<Vec<T>> = pairs.map(|(&id, entry)| read(id, entry)).collect();
        let whole = named.len() == self.tokens.len();
        entries.filter(|_| whole).ok_or_else(|| {
            Failure::Malformed(format!(
                "{field}: absent or of other tokens, must be one for each token"
            ))
        })
    }
}

/// A completion as a server sampled it.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The tokens, including a stop token or a stop string's tokens.
    pub tokens: Vec<u32>,
    /// The log-prob that the server reports for each token. NaN for a token without one, which is
    /// not trained on.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub end: End,
    /// The weight version, if the answer reports it.
    pub weight_version: Option<String>,
}

impl Drawn {
    /// Returns the log-probs, with 0 for those that the server does not report.
    pub(super) fn named_log_probs(&self) -> Vec<f32> {
        let named = |&log_prob: &f32| if log_prob.is_nan() { 0. } else { log_prob };
        self.log_probs.iter().map(named).collect()
    }
}

/// Why a server ended a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A stop token.
    StopToken,
    /// A stop string.
    StopString,
    /// The maximum length.
    Length,
    /// The server aborted it. If the client has [interrupted](Protocol::interrupt) it, the
    /// completion keeps its tokens, of which there may be none. Otherwise, it is sampled again.
    Aborted,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// There was no answer: no connection, a broken one, or a timeout.
    Connection(String),
    /// The status was not 2xx.
    Status {
        /// The status.
        status: u16,
        /// The message in the body.
        message: String,
    },
    /// The answer does not follow the server's API.
    Malformed(String),
    /// The server does not serve the weights that it received.
    LostWeights(String),
    /// This kind of server does not support the request.
    Unsupported(String),
}

impl Failure {
    /// Returns whether the server would answer another attempt in the same way.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Unsupported(_) => true,
            Self::Status {
                status: 408 | 425 | 429,
                ..
            } => false,
            Self::Status { status, .. } => (400..500).contains(status),
            _ => false,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection(message)
            | Self::Malformed(message)
            | Self::LostWeights(message)
            | Self::Unsupported(message) => f.write_str(message),
            Self::Status { status, message } => write!(f, "status {status}: {message}"),
        }
    }
}

/// One of an engine's servers.
pub struct Server {
    pub(super) url: String,
    pub(super) http: Arc<JsonClient>,
    pub(super) timeout: Duration,
    pub(super) model: OnceLock<ServedModel>,
    /// The group over which its processes can receive weights.
    pub(super) transfer: OnceLock<Transfer>,
    /// The memory in which it can read weights.
    pub(super) sharing: OnceLock<Sharing>,
    /// True if it sleeps while the policy trains.
    pub(super) sleeps: bool,
}

impl Server {
    /// The URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sends a request and waits for the answer. An empty body, or one that is not JSON, is null.
    ///
    /// # Errors
    ///
    /// Fails if there is no answer within `rollout.request_timeout`, or if its status is not 2xx.
    pub fn call(&self, call: &Call) -> Result<Value, Failure> {
        self.call_within(call, self.timeout)
    }

    /// Does the same as [`Self::call`], for a request that a server answers at once.
    pub(super) fn call_briefly(&self, call: &Call) -> Result<Value, Failure> {
        self.call_within(call, BRIEF.min(self.timeout))
    }

    fn call_within(&self, call: &Call, limit: Duration) -> Result<Value, Failure> {
        let text = self.send(call, limit, MAX_ANSWER)?;
        Ok(parsed(&text))
    }

    /// Sends a request whose answer has about `tokens` tokens, and parses it.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::call`]. [`Failure::Malformed`] if the answer is not JSON.
    pub fn ask(&self, call: &Call, tokens: usize) -> Result<Value, Failure> {
        let bytes = MAX_TOKEN.saturating_mul(tokens as u64);
        let text = self.send(call, self.timeout, MAX_ANSWER.saturating_add(bytes))?;
        serde_json::from_str(&text).map_err(|error| {
            let reason = json::message_with_place(&error);
            let begin = excerpt(text.chars().take(SHOWN + 1).collect(), SHOWN);
            let path = &call.path;
            Failure::Malformed(format!(
                "{path}: the answer is not JSON, {reason}: {begin:?}"
            ))
        })
    }

    /// Sends a request on a thread, and returns the receiver of its answer.
    pub(super) fn start(
        &self,
        call: Call,
        limit: Duration,
    ) -> Result<Receiver<Result<Value, Failure>>, Failure> {
        let (http, url) = (Arc::clone(&self.http), self.url.clone());
        let (sender, answer) = channel();
        let send = move || {
            let text = send(&http, &url, &call, limit, MAX_ANSWER);
            // Nobody may be waiting for it.
            let _ = sender.send(text.map(|text| parsed(&text)));
        };
        match thread::Builder::new().name("engine".to_owned()).spawn(send) {
            Ok(_) => Ok(answer),
            Err(error) => {
                let message = format!("no thread can be started: {error}");
                Err(Failure::Connection(message))
            }
        }
    }

    /// Returns the group over which the server's processes can receive weights.
    pub(super) fn transfer(&self) -> Result<&Transfer, Failure> {
        self.transfer.get().ok_or_else(|| {
            let message = "this program has no connection to the processes of servers";
            Failure::Unsupported(message.to_owned())
        })
    }

    /// Returns the memory in which the server can read weights.
    pub(super) fn sharing(&self) -> Result<&Sharing, Failure> {
        self.sharing.get().ok_or_else(|| {
            let message = "this program shares no memory of a GPU";
            Failure::Unsupported(message.to_owned())
        })
    }

    /// Returns whether the server may still read memory of this process, after a failed transfer.
    pub(super) fn shares_memory(&self) -> bool {
        self.sharing.get().is_some_and(Sharing::is_open)
    }

    /// Sends a request, and returns its answer's body.
    fn send(&self, call: &Call, time: Duration, bytes: u64) -> Result<String, Failure> {
        send(&self.http, &self.url, call, time, bytes)
    }
}

/// Parses an answer. An empty body, or one that is not JSON, is null.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(Value::Null)
}

/// Sends a request to the server at `root`, and returns its answer's body.
fn send(
    http: &JsonClient,
    root: &str,
    call: &Call,
    time: Duration,
    bytes: u64,
) -> Result<String, Failure> {
    let Call { path, body } = call;
    let limits = Limits { time, bytes };
    let url = format!("{root}{path}");
    let body = body.as_ref().map(Value::to_string);
    let answer = http.send(&url, body, limits);
    answer.map_err(|failure| match failure {
        RequestFailure::Status {
            status, message, ..
        } => Failure::Status {
            status,
            message: format!("{message} ({path})"),
        },
        failure => Failure::Connection(format!("{failure} ({path})")),
    })
}
