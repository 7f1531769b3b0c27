//! Requests with JSON.

use std::env;
use std::fmt;
use std::time::Duration;

use anyhow::Result;
use candle_grpo_core::Invalid;
use serde_json::Value;
use ureq::Agent;
use ureq::http::Response;

use super::retry::{is_transient, retry_after};
use candle_grpo_base::clock::Beginning;
use candle_grpo_base::secrets::hide_from_programs;

/// The longest message of an error in characters.
const MAX_MESSAGE: usize = 300;
/// The length in bytes from which a key is a secret. Shorter ones, such as `EMPTY`, stand for none.
const SECRET: usize = 8;

/// A client of servers.
pub struct JsonClient {
    agent: Agent,
    api_key: Option<String>,
}

/// The limits of an answer.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The longest time from the begin of a request to the end of its answer.
    pub time: Duration,
    /// The greatest size of the body.
    pub bytes: u64,
}

/// The failure of a request.
#[derive(Debug)]
pub enum RequestFailure {
    /// There was no whole answer within this time.
    Timeout(Duration),
    /// There was no whole answer for another reason.
    Connection(String),
    /// The status was not 2xx.
    Status {
        /// The status.
        status: u16,
        /// The message in the body.
        message: String,
        /// The pause that the server asks for.
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

/// Reads the API key from the environment variable of this name, which programs do not inherit.
///
/// # Errors
///
/// If the variable is not set, or its value cannot be the part of a header. The value is not in the
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
    /// through the proxy that the environment names.
    pub fn new(api_key: Option<String>, uses_proxy: bool) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // A connection that a restarted server has closed is not found out before it is used.
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

    /// Sends a request, a POST if it has a body of JSON, and returns the body of its answer. If the
    /// time was over because this process stood still, the request is sent again.
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
        let failed = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => RequestFailure::Timeout(limits.time),
            error => RequestFailure::Connection(self.redact(&error.to_string())),
        };
        let authorization = self.api_key.as_ref().map(|key| format!("Bearer {key}"));
        let authorization = authorization.iter();
        let time = Some(limits.time);
        let answer = match body {
            None => {
                let request = self.agent.get(url).config().timeout_global(time).build();
                authorization
                    .fold(request, |request, key| request.header("Authorization", key))
                    .call()
            }
            Some(body) => {
                let request = self.agent.post(url).config().timeout_global(time).build();
                authorization
                    .fold(request.content_type("application/json"), |request, key| {
                        request.header("Authorization", key)
                    })
                    .send(body)
            }
        };
        let mut answer = answer.map_err(failed)?;
        let text = text_of(&mut answer, limits.bytes).map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(RequestFailure::Status {
                status: status.as_u16(),
                message: message_of(&self.redact(&text)),
                retry_after: retry_after(answer.headers()),
            });
        }
        Ok(text)
    }

    /// The text without the key.
    pub fn redact(&self, text: &str) -> String {
        match &self.api_key {
            Some(key) if key.len() >= SECRET => text.replace(key.as_str(), "***"),
            _ => text.to_owned(),
        }
    }
}

fn text_of(answer: &mut Response<ureq::Body>, bytes: u64) -> Result<String, ureq::Error> {
    let body = answer.body_mut().with_config().limit(bytes);
    body.lossy_utf8(true).read_to_string()
}

/// The message in the body of an error: `error.message` in the API of OpenAI, the text otherwise.
fn message_of(text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
    let places = ["/error/message", "/message", "/error", "/detail"];
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
            ("Internal Server Error\n", "Internal Server Error"),
            ("", ""),
        ] {
            assert_eq!(message_of(text), message);
        }
        assert_eq!(message_of(&"x".repeat(1000)).len(), MAX_MESSAGE);
    }
}
