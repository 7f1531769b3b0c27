//! JSON requests.

use std::env;
use std::fmt;
use std::time::Duration;

use anyhow::Result;
use candle_grpo_core::Invalid;
use serde_json::Value;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};
use ureq::http::{self, Method, Request, Response};
use ureq::{Agent, AsSendBody, Body};

use super::retry::{is_transient, retry_after};
use candle_grpo_base::clock::Beginning;
use candle_grpo_base::secrets::hide_from_programs;

/// Maximum length of an error message in characters.
const MAX_MESSAGE: usize = 300;
/// Minimum length in bytes at which a key is a secret. Shorter ones, such as `EMPTY`, mean no key.
const SECRET: usize = 8;

/// A JSON client.
pub struct JsonClient {
    agent: Agent,
    api_key: Option<String>,
}

/// Response limits.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum time from sending a request to receiving its whole response.
    pub time: Duration,
    /// Maximum body size.
    pub bytes: u64,
}

/// A failed request.
#[derive(Debug)]
pub enum RequestFailure {
    /// There was no complete response within this time.
    Timeout(Duration),
    /// There was no complete response for another reason.
    Connection(String),
    /// The status was not 2xx.
    Status {
        /// The status.
        status: u16,
        /// The message in the body.
        message: String,
        /// The pause that the server requests.
        retry_after: Option<Duration>,
    },
}

impl RequestFailure {
    /// Returns whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Timeout(_) | Self::Connection(_) => true,
            Self::Status { status, .. } => is_transient(*status),
        }
    }
}

impl fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout(limit) => write!(f, "no answer within {} s", limit.as_secs_f64()),
            Self::Connection(message) => f.write_str(message),
            Self::Status {
                status, message, ..
            } => write!(f, "status {status}: {message}"),
        }
    }
}

/// Reads the API key from this environment variable, which programs do not inherit.
///
/// # Errors
///
/// If the variable is not set, or its value cannot be used in a header. The value is not in the
/// message.
pub fn api_key(variable: &str) -> Result<String> {
    hide_from_programs(variable);
    let must = "be the name of an environment variable that is set";
    let key = env::var(variable).ok().filter(|key| !key.is_empty());
    let key = key.ok_or_else(|| Invalid::new("api_key_env", variable, must))?;
    let must = "be the name of an environment variable with visible ASCII characters only";
    if key.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(key)
    } else {
        Err(Invalid::new("api_key_env", variable, must).into())
    }
}

impl JsonClient {
    /// Creates a client that sends `api_key` with each request. With `uses_proxy`, requests go
    /// through the proxy from the environment.
    pub fn new(api_key: Option<String>, uses_proxy: bool) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // If a restarted server has closed a connection, that is only noticed when it is used.
            .max_idle_connections(0)
            .user_agent(concat!("candle-grpo/", env!("CARGO_PKG_VERSION")));
        let config = if uses_proxy {
            config
        } else {
            config.proxy(None)
        };
        Self {
            agent: config.build().new_agent(),
            api_key,
        }
    }

    /// Sends a request, a POST if it has a JSON body, and returns the response body. If it timed
    /// out because this process was stopped, the request is sent again.
    pub fn send(
        &self,
        url: &str,
        body: Option<String>,
        limits: Limits,
    ) -> Result<String, RequestFailure> {
        loop {
            let beginning = Beginning::now();
            match self.send_once(url, body.clone(), limits) {
                Err(RequestFailure::Timeout(_)) if beginning.stood_still() => {}
                answer => return answer,
            }
        }
    }

    fn send_once(
        &self,
        url: &str,
        body: Option<String>,
        limits: Limits,
    ) -> Result<String, RequestFailure> {
        let method = if body.is_some() {
            Method::POST
        } else {
            Method::GET
        };
        let mut answer = self.open(method, url, &[], body, limits.time)?;
        let text = self.text(&mut answer, limits)?;
        if !answer.status().is_success() {
            return Err(self.refusal(&answer, &text));
        }
        Ok(text)
    }

    /// Returns the failure of a response with a status that is not 2xx, and this body.
    pub fn refusal(&self, answer: &Response<Body>, text: &str) -> RequestFailure {
        RequestFailure::Status {
            status: answer.status().as_u16(),
            message: message_of(&self.redact(text)),
            retry_after: retry_after(answer.headers()),
        }
    }

    /// Sends a request with additional headers, and returns the response, with any status, before
    /// its body. `time` also limits reading the body.
    ///
    /// # Errors
    ///
    /// Fails if there is no response.
    pub fn open(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Option<String>,
        time: Duration,
    ) -> Result<Response<Body>, RequestFailure> {
        let mut request = Request::builder().method(method).uri(url);
        if let Some(key) = &self.api_key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let failed = |error| self.failure(error, time);
        let answer = match body {
            Some(body) => self.run(request.body(body), time),
            None => self.run(request.body(()), time),
        };
        answer.map_err(failed)
    }

    fn run<B: AsSendBody>(
        &self,
        request: Result<Request<B>, http::Error>,
        time: Duration,
    ) -> Result<Response<Body>, ureq::Error> {
        let request = self.agent.configure_request(request?);
        self.agent.run(request.timeout_global(Some(time)).build())
    }

    /// Reads a response body from [`Self::open`].
    ///
    /// # Errors
    ///
    /// Fails if the body is incomplete, or exceeds `limits`.
    pub fn text(
        &self,
        answer: &mut Response<Body>,
        limits: Limits,
    ) -> Result<String, RequestFailure> {
        let body = answer.body_mut().with_config().limit(limits.bytes);
        let text = body.lossy_utf8(true).read_to_string();
        text.map_err(|error| self.failure(error, limits.time))
    }

    fn failure(&self, error: ureq::Error, limit: Duration) -> RequestFailure {
        match error {
            ureq::Error::Timeout(_) => RequestFailure::Timeout(limit),
            error => RequestFailure::Connection(self.redact(&error.to_string())),
        }
    }

    /// The text without the key.
    pub fn redact(&self, text: &str) -> String {
        redacted(text, self.api_key.as_deref())
    }
}

/// Returns `text` without `key`.
pub(crate) fn redacted(text: &str, key: Option<&str>) -> String {
    match key {
        Some(key) if key.len() >= SECRET => text.replace(key, "***"),
        _ => text.to_owned(),
    }
}

/// The message in an error body: `error.message` as in OpenAI's API, otherwise the text.
pub(crate) fn message_of(text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
    let places = [
        "/error/message",
        "/message",
        "/error",
        "/errors/0/message",
        "/detail",
    ];
    let message = places
        .iter()
        .find_map(|place| value.pointer(place)?.as_str())
        .unwrap_or(text);
    message.trim().chars().take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_error_is_found_wherever_an_engine_puts_it() {
        for (text, message) in [
            (
                r#"{"error": {"message": "too long", "code": 400}}"#,
                "too long",
            ),
            (r#"{"message": "no such adapter"}"#, "no such adapter"),
            (r#"{"error": "Unauthorized"}"#, "Unauthorized"),
            (r#"{"detail": "Not Found"}"#, "Not Found"),
            (r#"{"errors": [{"message": "not a list"}]}"#, "not a list"),
            ("Internal Server Error\n", "Internal Server Error"),
            ("", ""),
        ] {
            assert_eq!(message_of(text), message);
        }
        assert_eq!(message_of(&"x".repeat(1000)).len(), MAX_MESSAGE);
    }
}
