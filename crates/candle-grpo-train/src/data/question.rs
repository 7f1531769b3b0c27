//! Turns rows into questions.

use std::borrow::Cow;

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_core::Invalid;
use serde_json::{Value, json};

use super::rows::{Row, kind};
use candle_grpo_base::Template;

/// A row's question: text for the model to continue, or a conversation for it to answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// Text, used verbatim.
    Text(String),
    /// A conversation for the model's chat template: objects with `role` and other template keys,
    /// such as `content`.
    Messages(Vec<Value>),
}

/// Rules that turn rows into questions.
#[derive(Debug, Clone)]
pub(crate) struct Asking {
    pub(crate) prompt: Option<Template>,
    pub(crate) system: Option<String>,
    pub(crate) chat: Option<bool>,
    pub(crate) cut_answer: bool,
}

impl Asking {
    /// A row's question, from the first that exists: a configured template, `messages`, `prompt`
    /// (text or messages), `conversations`, `question` (GSM8K), `Body` and `Question` (SVAMP).
    pub(super) fn question(&self, row: &Row) -> Result<Question> {
        self.question_of_columns(&row.columns)
            .with_context(|| row.place())
    }

    pub(crate) fn question_of_columns(&self, columns: &Value) -> Result<Question> {
        self.refuse_media(columns)?;
        let text = |name: &str| columns.get(name).and_then(Value::as_str);
        if let Some(template) = &self.prompt {
            return self.ask(template.fill(columns)?, true);
        }
        for name in ["messages", "prompt", "conversations"] {
            match columns.get(name) {
                Some(Value::Array(messages)) => return self.converse(name, messages),
                // Text under `prompt` is continued by the model as it is.
                Some(Value::String(prompt)) if name == "prompt" => {
                    return self.ask(prompt.clone(), false);
                }
                // ROLL data files have messages as JSON text.
                Some(Value::String(text)) if text.trim_start().starts_with('[') => {
                    let messages: Vec<Value> =
                        serde_json::from_str(text).ok().with_context(|| {
                            format!("column {name:?}: a text, must be messages or their JSON")
                        })?;
                    return self.converse(name, &messages);
                }
                Some(other) => bail!(
                    "column {name:?}: {}, must be {}",
                    kind(other),
                    if name == "prompt" {
                        "a text or messages"
                    } else {
                        "messages"
                    }
                ),
                None => {}
            }
        }
        if let Some(question) = text("question") {
            return self.ask(question.to_owned(), true);
        }
        if let (Some(body), Some(question)) = (text("Body"), text("Question")) {
            return self.ask(joined(body, question), true);
        }
        for name in ["question", "Body", "Question"] {
            if let Some(other) = columns.get(name).filter(|value| !value.is_string()) {
                bail!("column {name:?}: {}, must be a text", kind(other));
            }
        }
        let names: Vec<&str> = columns
            .as_object()
            .map(|columns| columns.keys().map(String::as_str).collect())
            .unwrap_or_default();
        bail!(
            "no column \"prompt\", \"messages\" or \"question\" among {names:?}: name those of the question with data.prompt"
        )
    }

    /// Rejects a row with a column such as `images` that the prompt leaves out.
    pub(crate) fn refuse_media(&self, columns: &Value) -> Result<()> {
        let is_left_out = |name: &str| {
            let template = self.prompt.as_ref();
            !template.is_some_and(|template| template.has_column(name))
        };
        for (name, value) in columns.as_object().into_iter().flatten() {
            let is_media = MEDIA.contains(&name.to_lowercase().as_str());
            if is_media && !is_nothing(value) && is_left_out(name) {
                let must = "be absent or a part of data.prompt: only text is supported";
                return Err(Invalid::new("content", format!("column {name:?}"), must).into());
            }
        }
        Ok(())
    }

    /// Text as a question: a message if `chat` is true, which defaults to `is_chat`.
    fn ask(&self, text: String, is_chat: bool) -> Result<Question> {
        ensure!(!text.is_empty(), "the prompt is empty");
        if !self.chat.unwrap_or(is_chat) {
            ensure!(
                self.system.is_none(),
                "data.system: given, but the prompt is a plain text; set data.chat to true"
            );
            return Ok(Question::Text(text));
        }
        let user = message("user", &text);
        let system = self.system.iter().map(|text| message("system", text));
        Ok(Question::Messages(system.chain([user]).collect()))
    }

    fn converse(&self, name: &str, messages: &[Value]) -> Result<Question> {
        let mut conversation = self.conversation(name, messages)?;
        if conversation.last().is_some_and(is_answer) {
            ensure!(
                self.cut_answer,
                "column {name:?}: ends with a message of the assistant, so the prompt would give the answer away; remove it from the data, or set data.cut_answer to true"
            );
            while conversation.last().is_some_and(is_answer) {
                conversation.pop();
            }
            ensure!(
                conversation
                    .iter()
                    .any(|message| message["role"] != "system"),
                "column {name:?}: no message of the user before the answer"
            );
        }
        Ok(Question::Messages(conversation))
    }

    /// The messages in column `name` with their contents as text, after the system message.
    pub(crate) fn conversation(&self, name: &str, messages: &[Value]) -> Result<Vec<Value>> {
        ensure!(
            self.chat != Some(false),
            "column {name:?}: messages, but data.chat is false"
        );
        let mut conversation = text_messages(name, messages)?;
        if let Some(system) = &self.system
            && conversation[0]["role"] != "system"
        {
            conversation.insert(0, message("system", system));
        }
        Ok(conversation)
    }
}

/// The messages in column `name`, at least one, with their contents as text.
pub(crate) fn text_messages(name: &str, messages: &[Value]) -> Result<Vec<Value>> {
    ensure!(!messages.is_empty(), "column {name:?}: no messages");
    let messages = messages.iter().enumerate().map(|(i, message)| {
        let message = with_role(message).with_context(|| {
            format!(
                "column {name:?}: message {i} is {message}, must be an object with texts at \"role\" and \"content\", or at \"from\" and \"value\""
            )
        })?;
        with_text_content(&message).with_context(|| format!("column {name:?}: message {i}"))
    });
    messages.collect()
}

/// The message with its role in `role`. ShareGPT messages have `from` and `value` instead.
fn with_role(message: &Value) -> Option<Cow<'_, Value>> {
    if message.get("role").is_some_and(Value::is_string) {
        return Some(Cow::Borrowed(message));
    }
    let text = |key: &str| message.get(key).and_then(Value::as_str);
    let role = match text("from")? {
        "human" => "user",
        "gpt" => "assistant",
        role => role,
    };
    Some(Cow::Owned(self::message(role, text("value")?)))
}

/// Returns whether a model has written `message`.
pub(crate) fn is_answer(message: &Value) -> bool {
    let role = message["role"].as_str().unwrap_or_default();
    ANSWERING.contains(&role.to_lowercase().as_str())
}

/// The message with its content as a single text. Parts with type `text` are joined.
///
/// # Errors
///
/// Fails if the content is multimodal, with the part's type.
pub(crate) fn with_text_content(message: &Value) -> Result<Value> {
    let parts = match message.get("content") {
        // A message can consist of tool calls.
        None | Some(Value::Null | Value::String(_)) => return Ok(message.clone()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(not_text(kind(other))),
    };
    let mut text = String::new();
    for part in parts {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(words)) => text += words,
            (Some(kind), _) if kind != "text" => {
                return Err(not_text(format!("a part of type {kind:?}")));
            }
            _ => return Err(not_text(format!("the part {part}"))),
        }
    }
    let mut message = message.clone();
    message["content"] = Value::String(text);
    Ok(message)
}

fn not_text(content: impl std::fmt::Display) -> anyhow::Error {
    Invalid::new("content", content, "be text: only text is supported").into()
}

/// Roles for messages written by a model.
const ANSWERING: [&str; 3] = ["assistant", "model", "gpt"];

/// Returns whether a value contains nothing, such as `{"bytes": null, "path": null}`, which is how
/// Arrow represents a missing image.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().all(is_nothing),
        Value::Object(fields) => fields.values().all(is_nothing),
        value => value.is_null() || value == "",
    }
}

/// Usual column names for content that is not text.
const MEDIA: [&str; 7] = [
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "multi_modal_data",
];

pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Joins SVAMP's two columns. In many rows the body lacks its last period.
fn joined(body: &str, question: &str) -> String {
    let body = body.trim_end();
    let stop = if body.ends_with(['.', '?', '!', ',']) {
        ""
    } else {
        "."
    };
    format!("{body}{stop} {}", question.trim())
}
