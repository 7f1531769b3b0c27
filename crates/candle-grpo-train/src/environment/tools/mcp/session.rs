//! A session with a server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Error, anyhow, bail, ensure};
use candle_grpo_base::clock::running_time;
use candle_grpo_hub::http::{JsonClient, api_key};
use candle_grpo_rewards::program::Lines;
use serde_json::{Map, Value, json};

use super::McpServerConfig;
use super::http::HttpConnection;
use super::message::{Message, RpcError, answer, notification, request};
use super::output::{Listed, output};
use crate::Progress;

/// Maximum message size in bytes.
pub(super) const MAX_MESSAGE: usize = 4 << 20;
/// Number of messages that wait to be received.
pub(super) const MAX_WAITING: usize = 16;
/// Maximum number of other messages before an answer.
const MAX_OTHERS: usize = 10_000;
/// Maximum number of tools in a server's list.
const MAX_TOOLS: usize = 1_000;
/// Interval between checks for a stop request.
const POLL: Duration = Duration::from_millis(50);

/// Protocol versions whose sessions begin with `initialize`, the newest one first.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// The protocol version without `initialize`: each request describes the client.
const STATELESS: &str = "2026-07-28";

/// Why a request has no result.
pub(super) enum Failure {
    /// The server answered with an error.
    Rpc(RpcError),
    /// The server no longer has the HTTP session.
    Expired,
    /// A stop was requested.
    Interrupted,
    /// The server does not work.
    Broken(Error),
}

/// The next thing from a server.
pub(super) enum Received {
    Message(String),
    /// Nothing yet.
    Nothing,
    Expired,
    /// Nothing any more, for this reason.
    Ended(String),
}

/// Everything that a session starts with.
pub(super) struct Address {
    config: McpServerConfig,
    client: Arc<JsonClient>,
}

pub(super) struct Session {
    connection: Connection,
    /// Id for the next request.
    next_id: u64,
    is_stateless: bool,
    /// True once the server has answered a call, so that it may have state.
    has_called: bool,
    limit: Duration,
}

enum Connection {
    Program(Lines),
    Http(HttpConnection),
}

impl Address {
    /// Reads the key for the server, if it has one.
    pub(super) fn new(config: &McpServerConfig) -> anyhow::Result<Self> {
        let key = config.api_key_env.as_deref().map(api_key).transpose()?;
        let uses_proxy = (config.url.as_deref()).is_some_and(|url| url.starts_with("https://"));
        Ok(Self {
            config: config.clone(),
            client: Arc::new(JsonClient::new(key, uses_proxy)),
        })
    }

    fn connect(&self) -> anyhow::Result<Connection> {
        Ok(match &self.config.url {
            Some(url) => Connection::Http(HttpConnection::new(Arc::clone(&self.client), url)),
            None => {
                let program = self.config.program();
                Connection::Program(program.start_lines(MAX_MESSAGE, MAX_WAITING)?)
            }
        })
    }

    /// Starts a session.
    pub(super) fn start(&self, progress: &dyn Progress) -> Result<Session, Failure> {
        let program = self.config.program();
        let mut session = Session {
            connection: self.connect().map_err(Failure::Broken)?,
            next_id: 0,
            is_stateless: false,
            has_called: false,
            limit: program.start_limit,
        };
        match session.initialize(progress) {
            Ok(()) => {
                session.limit = program.limit;
                Ok(session)
            }
            Err(failure) => Err(session.stop(failure)),
        }
    }

    /// Starts a session and lists the server's tools.
    pub(super) fn list(&self, progress: &dyn Progress) -> Result<(Session, Vec<Listed>), Failure> {
        let mut session = self.start(progress)?;
        match session.list(self.config.program().start_limit, progress) {
            Ok(tools) => Ok((session, tools)),
            Err(failure) => Err(session.stop(failure)),
        }
    }
}

impl Session {
    fn initialize(&mut self, progress: &dyn Progress) -> Result<(), Failure> {
        let params = json!({
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": client_info(),
        });
        let result = match self.request("initialize", params, progress) {
            Err(Failure::Rpc(error)) if is_stateless(&error) => {
                self.is_stateless = true;
                self.connection.set_version(STATELESS, true);
                return Ok(());
            }
            Err(Failure::Rpc(error)) => return Err(refused("initialize", &error)),
            result => result?,
        };
        let version = negotiated(&result).map_err(Failure::Broken)?;
        self.connection.set_version(version, false);
        let initialized = notification("notifications/initialized");
        self.connection.send(&initialized, self.limit);
        Ok(())
    }

    fn list(&mut self, limit: Duration, progress: &dyn Progress) -> Result<Vec<Listed>, Failure> {
        let limit = std::mem::replace(&mut self.limit, limit);
        let mut tools = Vec::new();
        let mut cursors = BTreeSet::new();
        let mut params = json!({});
        loop {
            let page = match self.request("tools/list", params, progress) {
                Err(Failure::Rpc(error)) => return Err(refused("tools/list", &error)),
                page => page?,
            };
            let next = add_page(&page, &mut tools, &mut cursors);
            match next.context("tools/list").map_err(Failure::Broken)? {
                Some(cursor) => params = json!({ "cursor": cursor }),
                None => break,
            }
        }
        self.limit = limit;
        Ok(tools)
    }

    /// Calls a tool. Returns its output, or its own error.
    pub(super) fn call(
        &mut self,
        tool: &str,
        arguments: &Value,
        progress: &dyn Progress,
    ) -> Result<Result<String, String>, Failure> {
        let params = json!({"name": tool, "arguments": arguments});
        let result = match self.request("tools/call", params, progress) {
            // The policy wrote the arguments.
            Err(Failure::Rpc(error)) if error.code == RpcError::INVALID_PARAMS => {
                return Ok(Err(error.message));
            }
            Err(Failure::Rpc(error)) => return Err(refused("tools/call", &error)),
            result => result?,
        };
        self.has_called = true;
        output(result)
            .context("tools/call")
            .map_err(Failure::Broken)
    }

    /// Returns whether the server has answered a call, and may have state for the trajectory.
    pub(super) fn has_called(&self) -> bool {
        self.has_called
    }

    /// Ends the session, and adds what its program wrote to the error.
    pub(super) fn stop(self, failure: Failure) -> Failure {
        match (failure, self.connection) {
            (Failure::Broken(error), Connection::Program(lines)) => {
                Failure::Broken(lines.stop(error))
            }
            (Failure::Broken(error), Connection::Http(mut connection)) => {
                connection.abandon();
                Failure::Broken(error)
            }
            (failure, _) => failure,
        }
    }

    fn request(
        &mut self,
        method: &str,
        mut params: Value,
        progress: &dyn Progress,
    ) -> Result<Map<String, Value>, Failure> {
        if self.is_stateless {
            params["_meta"] = json!({
                "io.modelcontextprotocol/protocolVersion": STATELESS,
                "io.modelcontextprotocol/clientInfo": client_info(),
                "io.modelcontextprotocol/clientCapabilities": {},
            });
        }
        let id = self.next_id;
        self.next_id += 1;
        let deadline = running_time().saturating_add(self.limit);
        self.connection
            .ask(&request(id, method, &params), self.limit);
        let broken = |error: Error| Failure::Broken(error.context(method.to_owned()));
        for _ in 0..=MAX_OTHERS {
            let text = self.next_message(deadline, progress);
            let text = text.map_err(|failure| match failure {
                Failure::Broken(error) => broken(error),
                failure => failure,
            })?;
            match Message::read(&text).map_err(broken)? {
                Message::Response { id: found, outcome } => {
                    // A server that cannot read a request does not know its id.
                    let is_answer = found == id || found.is_null() && outcome.is_err();
                    if !is_answer {
                        return Err(broken(anyhow!("an answer to {found}, must be to {id}")));
                    }
                    return outcome.map_err(Failure::Rpc);
                }
                Message::Request { id, method } => {
                    self.connection.send(&answer(&id, &method), self.limit);
                }
                Message::Notification => {}
            }
        }
        let error = anyhow!("more than {MAX_OTHERS} messages without an answer");
        Err(broken(error))
    }

    /// Waits for the next message.
    fn next_message(
        &mut self,
        deadline: Duration,
        progress: &dyn Progress,
    ) -> Result<String, Failure> {
        loop {
            if progress.is_canceled() {
                return Err(Failure::Interrupted);
            }
            let rest = deadline.saturating_sub(running_time());
            match self.connection.receive(POLL.min(rest)) {
                Received::Message(text) => return Ok(text),
                Received::Nothing if rest.is_zero() => {
                    let seconds = self.limit.as_secs_f64();
                    let error = anyhow!("no answer within {seconds} seconds, the limit");
                    return Err(Failure::Broken(error));
                }
                Received::Nothing => {}
                Received::Expired => return Err(Failure::Expired),
                Received::Ended(reason) => return Err(Failure::Broken(anyhow!(reason))),
            }
        }
    }
}

impl Connection {
    fn set_version(&mut self, version: &'static str, has_routing_headers: bool) {
        if let Self::Http(connection) = self {
            connection.set_version(version, has_routing_headers);
        }
    }

    /// Sends a request.
    fn ask(&mut self, message: &Value, limit: Duration) {
        match self {
            Self::Program(lines) => lines.send(line(message)),
            Self::Http(connection) => connection.ask(message, limit),
        }
    }

    /// Sends a notification or an answer.
    fn send(&self, message: &Value, limit: Duration) {
        match self {
            Self::Program(lines) => lines.send(line(message)),
            Self::Http(connection) => connection.send(message, limit),
        }
    }

    fn receive(&mut self, patience: Duration) -> Received {
        match self {
            Self::Program(lines) => match lines.receive(patience) {
                Ok(Ok(line)) => Received::Message(line),
                Ok(Err(error)) => Received::Ended(error),
                Err(RecvTimeoutError::Timeout) => Received::Nothing,
                Err(RecvTimeoutError::Disconnected) => Received::Ended("it ended".to_owned()),
            },
            Self::Http(connection) => connection.receive(patience),
        }
    }
}

fn line(message: &Value) -> Vec<u8> {
    format!("{message}\n").into_bytes()
}

fn client_info() -> Value {
    json!({"name": "candle-grpo", "version": env!("CARGO_PKG_VERSION")})
}

/// Returns whether a server without `initialize` refuses it with this error.
fn is_stateless(error: &RpcError) -> bool {
    let supported = error.data.get("supported").and_then(Value::as_array);
    match error.code {
        RpcError::METHOD_NOT_FOUND => true,
        RpcError::UNSUPPORTED_VERSION => {
            supported.is_some_and(|versions| versions.iter().any(|version| version == STATELESS))
        }
        _ => false,
    }
}

fn refused(method: &str, error: &RpcError) -> Failure {
    let RpcError { code, message, .. } = error;
    Failure::Broken(anyhow!("{method}: error {code}: {message}"))
}

/// The protocol version that a server has chosen.
fn negotiated(result: &Map<String, Value>) -> anyhow::Result<&'static str> {
    let found = result.get("protocolVersion").unwrap_or(&Value::Null);
    let version = VERSIONS.into_iter().find(|version| found == version);
    let must = || format!("be one of {}", VERSIONS.join(", "));
    let version = version.ok_or_else(|| anyhow!("protocolVersion: {found}, must {}", must()))?;
    let capabilities = result.get("capabilities");
    let has_tools = capabilities.is_some_and(|all| all.get("tools").is_some());
    ensure!(has_tools, "capabilities: must have \"tools\"");
    Ok(version)
}

/// Adds the tools on a page, and returns the cursor of the next one.
fn add_page(
    page: &Map<String, Value>,
    tools: &mut Vec<Listed>,
    cursors: &mut BTreeSet<String>,
) -> anyhow::Result<Option<String>> {
    let list = page.get("tools").and_then(Value::as_array);
    for tool in list.context("tools: must be a list")? {
        tools.push(Listed::read(tool)?);
    }
    ensure!(tools.len() <= MAX_TOOLS, "more than {MAX_TOOLS} tools");
    match page.get("nextCursor") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(cursor)) if cursors.insert(cursor.clone()) => Ok(Some(cursor.clone())),
        Some(cursor) => bail!("nextCursor: {cursor}, must be a new text on each page"),
    }
}
