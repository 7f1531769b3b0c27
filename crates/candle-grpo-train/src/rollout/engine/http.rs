//! HTTP requests.

use std::time::Duration;

use serde_json::Value;
use ureq::Agent;
use ureq::http::Response;

use super::protocol::{Call, Failure};

/// The longest answer in bytes.
const MAX_ANSWER: u64 = 1 << 30;
/// The longest message of an error in characters.
const MAX_MESSAGE: usize = 300;

/// A client of servers.
pub(super) struct Http {
    agent: Agent,
    /// The header `Authorization`.
    authorization: Option<String>,
}

impl Http {
    pub(super) fn new(api_key: Option<&str>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Servers of engines stand in the same network.
            .proxy(None)
            .max_redirects(0)
            // A connection that a restarted server has closed is not found out before it is used.
            .max_idle_connections(0)
            .user_agent(concat!("candle-grpo/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.new_agent(),
            authorization: api_key.map(|key| format!("Bearer {key}")),
        }
    }

    /// Sends a request to the server at `url`, and returns the JSON of its answer.
    pub(super) fn send(&self, url: &str, call: &Call, limit: Duration) -> Result<Value, Failure> {
        let url = format!("{url}{}", call.path);
        let failed = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => Failure::Connection(format!(
                "no answer within {} s ({})",
                limit.as_secs_f64(),
                call.path
            )),
            error => Failure::Connection(format!("{error} ({})", call.path)),
        };
        let authorization = self.authorization.iter();
        let answer = match &call.body {
            None => {
                let request = self.agent.get(&url).config().timeout_global(Some(limit));
                let request = request.build();
                authorization
                    .fold(request, |request, key| request.header("Authorization", key))
                    .call()
            }
            Some(body) => {
                let request = self.agent.post(&url).config().timeout_global(Some(limit));
                let request = request.build().content_type("application/json");
                authorization
                    .fold(request, |request, key| request.header("Authorization", key))
                    .send(body.to_string())
            }
        };
        let mut answer = answer.map_err(failed)?;
        let text = text_of(&mut answer).map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(Failure::Status {
                status: status.as_u16(),
                message: format!("{} ({})", message_of(&text), call.path),
            });
        }
        Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
    }
}

fn text_of(answer: &mut Response<ureq::Body>) -> Result<String, ureq::Error> {
    let body = answer.body_mut().with_config().limit(MAX_ANSWER);
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
