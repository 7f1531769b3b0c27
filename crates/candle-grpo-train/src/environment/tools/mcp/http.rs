//! The streamable HTTP transport.

use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use candle_grpo_hub::http::header::{CONTENT_TYPE, LOCATION};
use candle_grpo_hub::http::{Body, JsonClient, Limits, Method, Response};
use serde_json::Value;

use super::session::{MAX_MESSAGE, MAX_WAITING, Received};

const SESSION_ID: &str = "mcp-session-id";
const NOT_FOUND: u16 = 404;

/// Time for a thread to end after its request's limit.
const GRACE: Duration = Duration::from_secs(1);

/// Maximum time to end a session.
const END_LIMIT: Duration = Duration::from_secs(2);

/// A connection to a server at a URL.
pub(super) struct HttpConnection {
    exchange: Exchange,
    /// The messages that the server sends in answer to the last request.
    answers: Option<Receiver<Event>>,
}

/// The parts of a request that stay the same.
#[derive(Clone)]
struct Exchange {
    client: Arc<JsonClient>,
    url: String,
    /// The server's name for the session.
    session_id: Option<String>,
    /// The negotiated protocol version.
    version: Option<&'static str>,
    /// True if headers repeat a request's method and tool.
    has_routing_headers: bool,
}

enum Event {
    SessionId(String),
    Message(String),
    Expired,
    Failed(String),
}

impl HttpConnection {
    pub(super) fn new(client: Arc<JsonClient>, url: &str) -> Self {
        Self {
            exchange: Exchange {
                client,
                url: url.to_owned(),
                session_id: None,
                version: None,
                has_routing_headers: false,
            },
            answers: None,
        }
    }

    pub(super) fn set_version(&mut self, version: &'static str, has_routing_headers: bool) {
        self.exchange.version = Some(version);
        self.exchange.has_routing_headers = has_routing_headers;
    }

    /// Sends a request, whose answer [`Self::receive`] returns.
    pub(super) fn ask(&mut self, message: &Value, limit: Duration) {
        self.answers = Some(self.post(message, limit));
    }

    /// Sends a notification or an answer. A failure shows at the next request.
    pub(super) fn send(&self, message: &Value, limit: Duration) {
        // Without an answer, the thread ends with the response.
        let _ = self.post(message, limit).recv_timeout(limit);
    }

    pub(super) fn receive(&mut self, patience: Duration) -> Received {
        let ended = || Received::Ended("the response ended without an answer".to_owned());
        let Some(answers) = &self.answers else {
            return ended();
        };
        match answers.recv_timeout(patience) {
            Ok(Event::SessionId(id)) => {
                self.exchange.session_id = Some(id);
                Received::Nothing
            }
            Ok(Event::Message(text)) => Received::Message(text),
            Ok(Event::Expired) => {
                self.exchange.session_id = None;
                Received::Expired
            }
            Ok(Event::Failed(error)) => Received::Ended(error),
            Err(RecvTimeoutError::Timeout) => Received::Nothing,
            Err(RecvTimeoutError::Disconnected) => ended(),
        }
    }

    /// Gives the session up, without a request to a server that has failed.
    pub(super) fn abandon(&mut self) {
        self.exchange.session_id = None;
    }

    /// Sends a message on a thread, so that the wait for its answer can be canceled.
    fn post(&self, message: &Value, limit: Duration) -> Receiver<Event> {
        let (events, answers) = sync_channel(MAX_WAITING);
        let (exchange, message) = (self.exchange.clone(), message.clone());
        let time = limit.saturating_add(GRACE);
        thread::spawn(move || {
            if let Err(event) = exchange.run(&message, time, &events) {
                // No one may be waiting any more.
                let _ = events.send(event);
            }
        });
        answers
    }
}

impl Drop for HttpConnection {
    fn drop(&mut self) {
        let Exchange { client, url, .. } = &self.exchange;
        if self.exchange.session_id.is_some() {
            let headers = self.exchange.headers(&Value::Null);
            // Servers may not support it, and end sessions by themselves.
            let _ = client.open(Method::DELETE, url, &headers, None, END_LIMIT);
        }
    }
}

impl Exchange {
    fn headers<'a>(&'a self, message: &'a Value) -> Vec<(&'static str, &'a str)> {
        let mut headers = vec![("accept", "application/json, text/event-stream")];
        let session = self.session_id.as_deref().map(|id| (SESSION_ID, id));
        headers.extend(session);
        headers.extend(
            self.version
                .map(|version| ("mcp-protocol-version", version)),
        );
        if self.has_routing_headers {
            let text = |path: &str| message.pointer(path).and_then(Value::as_str);
            headers.extend(text("/method").map(|method| ("mcp-method", method)));
            headers.extend(text("/params/name").map(|name| ("mcp-name", name)));
        }
        headers
    }

    /// Sends a message, and passes on what the server answers until no one receives it.
    fn run(
        &self,
        message: &Value,
        time: Duration,
        events: &SyncSender<Event>,
    ) -> Result<(), Event> {
        let failed = |error: &dyn ToString| Event::Failed(error.to_string());
        let client = &self.client;
        let (headers, body) = (self.headers(message), message.to_string());
        let answer = client.open(Method::POST, &self.url, &headers, Some(body), time);
        let mut answer = answer.map_err(|error| failed(&error))?;
        let header = |answer: &Response<Body>, name: &str| {
            let value = answer.headers().get(name)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let bytes = MAX_MESSAGE as u64;
        let limits = Limits { time, bytes };
        if !answer.status().is_success() {
            if let Some(place) = header(&answer, LOCATION.as_str()) {
                let status = answer.status().as_u16();
                let message = format!("status {status}: url must be the address {place:?}");
                return Err(Event::Failed(message));
            }
            let text = client.text(&mut answer, limits);
            let text = text.map_err(|error| failed(&error))?;
            if answer.status().as_u16() == NOT_FOUND && self.session_id.is_some() {
                return Err(Event::Expired);
            }
            let value: Value = serde_json::from_str(&text).unwrap_or_default();
            return Err(match value.get("jsonrpc") {
                Some(_) => Event::Message(text),
                None => failed(&client.refusal(&answer, &text)),
            });
        }
        if let Some(id) = header(&answer, SESSION_ID)
            && events.send(Event::SessionId(id)).is_err()
        {
            return Ok(());
        }
        let kind = header(&answer, CONTENT_TYPE.as_str()).unwrap_or_default();
        if !kind.starts_with("text/event-stream") {
            let text = client.text(&mut answer, limits);
            let text = text.map_err(|error| failed(&error))?;
            return match text.trim() {
                "" => Ok(()),
                text => Err(Event::Message(text.to_owned())),
            };
        }
        let body = answer.into_body().into_with_config().limit(bytes);
        read_events(BufReader::new(body.reader()), |data| {
            events.send(Event::Message(data)).is_ok()
        })
        .map_err(|error| failed(&client.redact(&error.to_string())))
    }
}

/// Passes the data of each server-sent event to `deliver`, until it returns false.
fn read_events(
    mut stream: impl BufRead,
    mut deliver: impl FnMut(String) -> bool,
) -> std::io::Result<()> {
    let mut data: Vec<String> = Vec::new();
    let mut line = String::new();
    loop {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            // An event without an empty line at its end is incomplete.
            return Ok(());
        }
        let line = line.trim_end_matches(['\r', '\n']);
        if let Some(rest) = line.strip_prefix("data:") {
            data.push(rest.strip_prefix(' ').unwrap_or(rest).to_owned());
        } else if line.is_empty() {
            let event = data.join("\n");
            data.clear();
            if !event.is_empty() && !deliver(event) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_the_data_of_their_lines() {
        let stream = "id: 0\ndata:\n\n: comment\r\nevent: message\r\ndata: {\"a\":\r\ndata:1}\r\n\r\n\
                      retry: 10\n\ndata: 2\n\ndata: cut";
        let mut events = Vec::new();
        let deliver = |event| {
            events.push(event);
            true
        };
        read_events(stream.as_bytes(), deliver).unwrap();
        assert_eq!(events, ["{\"a\":\n1}", "2"]);
    }
}
