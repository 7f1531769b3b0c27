//! The APIs that agents speak: request bodies, and answers as JSON and as events.

mod chat;
mod completions;
mod fields;
mod messages;
mod responses;

use serde_json::{Value, json};

use crate::request::{Answer, Refusal, Request};
use fields::Fields;

/// An API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// OpenAI's `/v1/chat/completions`.
    Chat,
    /// OpenAI's `/v1/completions`.
    Completions,
    /// OpenAI's `/v1/responses`.
    Responses,
    /// Anthropic's `/v1/messages`.
    Messages,
}

/// Answer format.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    /// Model name in the request, which the answer repeats.
    pub(crate) model: String,
    /// True if the answer is an event stream.
    pub(crate) streams: bool,
    /// True if a stream ends with the token counts.
    pub(crate) streams_usage: bool,
    /// True if the answer has log-probs.
    pub(crate) log_probs: bool,
    /// Parts of the request that the answer repeats.
    pub(crate) echo: Value,
}

impl Form {
    /// Reads a request's form. Its dialect sets log-probs and echo.
    fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        Ok(Self {
            model: fields.text("model")?.unwrap_or_default().to_owned(),
            streams: fields.flag("stream")?,
            streams_usage: match fields.get("stream_options") {
                Some(options) => Fields::new(options, "stream_options")?.flag("include_usage")?,
                None => false,
            },
            log_probs: false,
            echo: Value::Null,
        })
    }
}

/// A stream event. Its type is absent in chat completion streams.
pub(crate) struct Event {
    kind: Option<&'static str>,
    data: Value,
}

impl Event {
    fn new(data: Value) -> Self {
        Self { kind: None, data }
    }

    fn typed(kind: &'static str, mut data: Value) -> Self {
        data["type"] = kind.into();
        Self {
            kind: Some(kind),
            data,
        }
    }
}

impl Dialect {
    /// Returns the dialect for a path below `/v1/`.
    pub(crate) fn of_path(path: &str) -> Option<Self> {
        match path {
            "chat/completions" => Some(Self::Chat),
            "completions" => Some(Self::Completions),
            "responses" => Some(Self::Responses),
            "messages" => Some(Self::Messages),
            _ => None,
        }
    }

    /// Parses a request body.
    pub(crate) fn read(self, body: &Value) -> Result<(Request, Form), Refusal> {
        match self {
            Self::Chat => chat::read(body),
            Self::Completions => completions::read(body),
            Self::Responses => responses::read(body),
            Self::Messages => messages::read(body),
        }
    }

    /// Returns the answer as JSON.
    pub(crate) fn json(self, answer: &Answer, form: &Form) -> Value {
        match self {
            Self::Chat => chat::json(answer, form),
            Self::Completions => completions::json(answer, form),
            Self::Responses => responses::json(answer, form),
            Self::Messages => messages::json(answer, form),
        }
    }

    /// Returns the answer as server-sent events.
    pub(crate) fn stream(self, answer: &Answer, form: &Form) -> String {
        let events = match self {
            Self::Chat => chat::events(answer, form),
            Self::Completions => completions::events(answer, form),
            Self::Responses => responses::events(answer, form),
            Self::Messages => messages::events(answer, form),
        };
        let mut stream = String::new();
        for Event { kind, data } in events {
            if let Some(kind) = kind {
                stream += &format!("event: {kind}\n");
            }
            stream += &format!("data: {data}\n\n");
        }
        if matches!(self, Self::Chat | Self::Completions) {
            stream += "data: [DONE]\n\n";
        }
        stream
    }

    /// Returns the body for a refusal.
    pub(crate) fn refusal(self, refusal: &Refusal) -> Value {
        let Refusal {
            status,
            code,
            param,
            message,
        } = refusal;
        match self {
            Self::Messages => {
                let kind = match status {
                    401 => "authentication_error",
                    404 => "not_found_error",
                    413 => "request_too_large",
                    429 => "rate_limit_error",
                    500.. => "api_error",
                    _ => "invalid_request_error",
                };
                json!({"type": "error", "error": {"type": kind, "message": message}})
            }
            _ => {
                let kind = match status {
                    401 => "authentication_error",
                    500.. => "server_error",
                    _ => "invalid_request_error",
                };
                let error = json!({"message": message, "type": kind, "param": param, "code": code});
                json!({"error": error})
            }
        }
    }
}
