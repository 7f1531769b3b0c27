//! Requests and answers in one form for all dialects.

use std::sync::Arc;

pub(crate) use candle_grpo_base::server::Refusal;
use serde_json::Value;

use crate::message::Message;

/// A request for one answer.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) input: Input,
    /// The role that the policy plays, if the run has roles.
    pub(crate) role: Option<String>,
    /// True if the answer's tool calls are moved out of its text.
    pub(crate) parses_calls: bool,
    pub(crate) max_tokens: Option<usize>,
    /// Strings that end the answer, and are not part of it.
    pub(crate) stop: Vec<String>,
    pub(crate) log_probs: bool,
    /// The request's sampling settings, which have no effect.
    pub(crate) sampling: Vec<(&'static str, f64)>,
}

/// The question.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    /// A conversation.
    Chat {
        messages: Vec<Message>,
        tools: Option<Value>,
        /// True if the messages begin with instructions, which apply to one answer.
        has_instructions: bool,
        /// Id of the answer whose conversation the messages continue.
        previous: Option<String>,
    },
    /// A text that the answer continues.
    Text(String),
    /// Tokens that the answer continues.
    Tokens(Vec<u32>),
}

impl Input {
    /// A conversation that has all its messages.
    pub(crate) fn chat(messages: Vec<Message>, tools: Option<Value>) -> Self {
        Self::Chat {
            messages,
            tools,
            has_instructions: false,
            previous: None,
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Identifier, unique within the episode.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) message: Message,
    pub(crate) end: End,
    pub(crate) prompt_tokens: usize,
    /// Number of sampled tokens.
    pub(crate) drawn: usize,
    /// Sampled tokens, if the request asks for log-probs.
    pub(crate) tokens: Vec<DrawnToken>,
}

/// A token with its log-prob under the policy.
#[derive(Debug)]
pub(crate) struct DrawnToken {
    pub(crate) text: String,
    pub(crate) log_prob: f32,
}

/// The reason why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// The policy ended it.
    Stop,
    /// A string of [`Request::stop`] ended it.
    StopString(String),
    /// It has the maximum length.
    Length,
    /// It calls tools.
    Calls,
}

/// An answer, or the reason why there is none.
pub(crate) type Outcome = Result<Arc<Answer>, Refusal>;
