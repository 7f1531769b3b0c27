//! What a row asks.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::rows::{Row, kind};
use super::template::Template;

/// What a row asks: a text that the model goes on with, or a conversation that it answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// A text, which is taken as it is.
    Text(String),
    /// A conversation, which becomes a text by the chat template of the model: objects with `role` and what else the template asks
    /// for, such as `content`.
    Messages(Vec<Value>),
}

/// How rows become questions.
#[derive(Debug, Clone)]
pub(super) struct Asking {
    pub(super) prompt: Option<Template>,
    pub(super) system: Option<String>,
    pub(super) chat: Option<bool>,
}

impl Asking {
    /// The question of a row, by its first column of this kind: a template that is given, `messages`, `prompt` (a text or
    /// messages), `question` (GSM8K), `Body` and `Question` (SVAMP).
    pub(super) fn question(&self, row: &Row) -> Result<Question> {
        self.of_columns(&row.columns).with_context(|| row.place())
    }

    fn of_columns(&self, columns: &Value) -> Result<Question> {
        let text = |name: &str| columns.get(name).and_then(Value::as_str);
        if let Some(template) = &self.prompt {
            return self.ask(template.fill(columns)?, true);
        }
        for name in ["messages", "prompt"] {
            match columns.get(name) {
                Some(Value::Array(messages)) => return self.converse(name, messages),
                // A text under `prompt` is what the model goes on with, as it stands.
                Some(Value::String(prompt)) if name == "prompt" => {
                    return self.ask(prompt.clone(), false);
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
        let names: Vec<&str> = columns
            .as_object()
            .map(|columns| columns.keys().map(String::as_str).collect())
            .unwrap_or_default();
        bail!(
            "no column \"prompt\", \"messages\" or \"question\" among {names:?}: name columns with data.prompt, such as \"{{{}}}\"",
            names.first().unwrap_or(&"column")
        )
    }

    /// A text as a question: as a message where `chat` says so, or by default where it is one of a person.
    fn ask(&self, text: String, of_a_person: bool) -> Result<Question> {
        ensure!(!text.is_empty(), "the prompt is empty");
        if !self.chat.unwrap_or(of_a_person) {
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
        ensure!(
            self.chat != Some(false),
            "column {name:?}: messages, but data.chat is false"
        );
        ensure!(!messages.is_empty(), "column {name:?}: no messages");
        let mut conversation = Vec::with_capacity(messages.len() + 1);
        for (i, message) in messages.iter().enumerate() {
            ensure!(
                message.get("role").is_some_and(Value::is_string),
                "column {name:?}: message {i} is {message}, must be an object with a text at \"role\""
            );
            conversation.push(message.clone());
        }
        if let Some(system) = &self.system
            && conversation[0]["role"] != "system"
        {
            conversation.insert(0, message("system", system));
        }
        Ok(Question::Messages(conversation))
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// SVAMP's two columns as one text: many a body lacks its last full stop.
fn joined(body: &str, question: &str) -> String {
    let body = body.trim_end();
    let stop = if body.ends_with(['.', '?', '!', ',']) {
        ""
    } else {
        "."
    };
    format!("{body}{stop} {}", question.trim())
}
