//! Conversation messages, in one form for all dialects.

use serde_json::{Map, Value, json};

/// A message.
#[derive(Debug, Clone, Default)]
pub(crate) struct Message {
    pub(crate) role: String,
    /// Text, joined over all parts; empty without content.
    pub(crate) content: String,
    pub(crate) calls: Vec<Call>,
    /// Id of the call to which this is the result.
    pub(crate) call_id: Option<String>,
    pub(crate) name: Option<String>,
    /// Reasoning, apart from the content, for the chat template.
    pub(crate) reasoning: Option<String>,
}

/// A tool call.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// An object, or a text that is not a JSON object.
    pub(crate) arguments: Value,
}

pub(crate) const ASSISTANT: &str = "assistant";
pub(crate) const TOOL: &str = "tool";

impl Message {
    pub(crate) fn new(role: &str, content: impl Into<String>) -> Self {
        Self {
            role: role.to_owned(),
            content: content.into(),
            ..Self::default()
        }
    }

    /// Returns true if two messages have the same meaning. Call ids and reasoning do not count,
    /// because clients change or drop them.
    pub(crate) fn says(&self, other: &Self) -> bool {
        let same_calls = || {
            let pairs = self.calls.iter().zip(&other.calls);
            let same = |(a, b): (&Call, &Call)| a.name == b.name && a.arguments == b.arguments;
            self.calls.len() == other.calls.len() && pairs.into_iter().all(same)
        };
        self.role == other.role
            && self.content == other.content
            && self.call_id == other.call_id
            && self.name == other.name
            && same_calls()
    }

    /// Returns the message for a chat template.
    pub(crate) fn to_value(&self) -> Value {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), self.role.as_str().into());
        let texts = [
            ("reasoning_content", self.reasoning.as_ref()),
            ("content", Some(&self.content)),
            ("tool_call_id", self.call_id.as_ref()),
            ("name", self.name.as_ref()),
        ];
        for (name, text) in texts {
            if let Some(text) = text {
                fields.insert(name.to_owned(), text.as_str().into());
            }
        }
        if !self.calls.is_empty() {
            let calls: Vec<Value> = self.calls.iter().map(Call::to_value).collect();
            fields.insert("tool_calls".to_owned(), calls.into());
        }
        Value::Object(fields)
    }
}

impl Call {
    fn to_value(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }

    /// Returns the arguments as JSON text.
    pub(crate) fn arguments_text(&self) -> String {
        match &self.arguments {
            Value::String(text) => text.clone(),
            arguments => arguments.to_string(),
        }
    }
}

/// Parses a call's arguments: an object if the text is one in JSON, otherwise the text.
pub(crate) fn arguments(text: &str) -> Value {
    match candle_grpo_base::large_integers::parsed(text) {
        Ok(object @ Value::Object(_)) => object,
        _ => Value::String(text.to_owned()),
    }
}

/// Names tool results after their calls, because some chat templates print the names.
pub(crate) fn name_results(messages: &mut [Message]) {
    for at in 0..messages.len() {
        let (before, rest) = messages.split_at_mut(at);
        let message = &mut rest[0];
        if message.role != TOOL || message.name.is_some() {
            continue;
        }
        let mut calls = before.iter().rev().flat_map(|message| &message.calls);
        let call = calls.find(|call| Some(&call.id) == message.call_id.as_ref());
        message.name = call.map(|call| call.name.clone());
    }
}
