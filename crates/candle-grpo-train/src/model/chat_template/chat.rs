//! Chat template input.

use std::collections::BTreeMap;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Serialize};

/// Chat template input. JSON keys keep their order, because a template may print them.
///
/// ```
/// use candle_grpo_train::model::Chat;
///
/// let text = r#"{"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true}"#;
/// let chat: Chat = serde_json::from_str(text).unwrap();
/// # let _ = chat;
/// ```
#[derive(Debug, Clone, Deserialize)]
pub struct Chat {
    messages: Value,
    #[serde(default)]
    tools: Option<Value>,
    /// True if the tool template renders the chat, even without a tool list.
    #[serde(skip)]
    is_of_tools: bool,
    #[serde(default)]
    documents: Option<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    #[serde(default)]
    variables: BTreeMap<String, Value>,
}

impl Chat {
    /// Creates a chat from a list of objects with `role`, `content` and other template keys.
    pub fn new(messages: impl Serialize) -> Self {
        Self {
            messages: Value::from_serialize(messages),
            tools: None,
            is_of_tools: false,
            documents: None,
            add_generation_prompt: false,
            variables: BTreeMap::new(),
        }
    }

    /// Appends the start of the assistant's answer.
    #[must_use]
    pub fn generation_prompt(mut self) -> Self {
        self.add_generation_prompt = true;
        self
    }

    /// Sets the list of available tools, each a JSON schema.
    #[must_use]
    pub fn tools(mut self, tools: impl Serialize) -> Self {
        self.tools = Some(Value::from_serialize(tools));
        self
    }

    /// Sets whether the tool template renders the chat, if the model has one.
    pub(crate) fn of_tools(self, is_of_tools: bool) -> Self {
        Self {
            is_of_tools,
            ..self
        }
    }

    pub(super) fn has_tools(&self) -> bool {
        self.is_of_tools || self.tools.as_ref().is_some_and(|tools| !tools.is_none())
    }

    /// Sets a row's tools and variables, if it has them.
    #[must_use]
    pub fn with_row(
        mut self,
        tools: Option<&serde_json::Value>,
        variables: Option<&serde_json::Map<String, serde_json::Value>>,
    ) -> Self {
        if let Some(tools) = tools {
            self = self.tools(tools);
        }
        for (name, value) in variables.into_iter().flatten() {
            self = self.variable(name, value);
        }
        self
    }

    /// Sets a list of documents with `title` and `text`.
    #[must_use]
    pub fn documents(mut self, documents: impl Serialize) -> Self {
        self.documents = Some(Value::from_serialize(documents));
        self
    }

    /// Sets another template variable, for example `enable_thinking`.
    #[must_use]
    pub fn variable(mut self, name: &str, value: impl Serialize) -> Self {
        self.variables
            .insert(name.to_owned(), Value::from_serialize(value));
        self
    }

    /// Names that a variable cannot have, because they are other template inputs.
    pub const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

    /// The template input with `special_tokens` and the template's own `variables`.
    pub(super) fn context(
        &self,
        special_tokens: &[(&'static str, String)],
        variables: &BTreeMap<String, Value>,
    ) -> Value {
        let mut context: BTreeMap<&str, Value> = special_tokens
            .iter()
            .map(|(name, text)| (*name, Value::from(text.as_str())))
            .collect();
        for (name, value) in variables.iter().chain(&self.variables) {
            context.insert(name, value.clone());
        }
        context.insert("messages", with_reasoning(&self.messages));
        let or_none = |value: &Option<Value>| value.clone().unwrap_or(Value::from(()));
        context.insert("tools", or_none(&self.tools));
        context.insert("documents", or_none(&self.documents));
        context.insert(
            "add_generation_prompt",
            Value::from(self.add_generation_prompt),
        );
        Value::from_iter(context)
    }
}

/// Copies a message's reasoning to both `reasoning_content` and `thinking`, like transformers.
fn with_reasoning(messages: &Value) -> Value {
    let Ok(all) = messages.try_iter() else {
        return messages.clone();
    };
    if messages.kind() != ValueKind::Seq {
        return messages.clone();
    }
    let filled = |message: Value| {
        let reasoning = ["reasoning_content", "thinking", "reasoning"]
            .into_iter()
            .filter_map(|name| message.get_attr(name).ok())
            .find(|value| !value.is_undefined() && !value.is_none());
        let (Some(reasoning), ValueKind::Map, Ok(keys)) =
            (reasoning, message.kind(), message.try_iter())
        else {
            return message;
        };
        let mut entries: Vec<(Value, Value)> = keys
            .map(|key| {
                let value = match key.as_str() {
                    Some("reasoning_content") => reasoning.clone(),
                    _ => message.get_item(&key).unwrap_or_default(),
                };
                (key, value)
            })
            .collect();
        let lacks = |name: &str| !entries.iter().any(|(key, _)| key.as_str() == Some(name));
        let (thinking, content) = (lacks("thinking"), lacks("reasoning_content"));
        if thinking {
            entries.insert(0, (Value::from("thinking"), reasoning.clone()));
        }
        if content {
            entries.push((Value::from("reasoning_content"), reasoning));
        }
        entries.into_iter().collect()
    };
    all.map(filled).collect()
}
