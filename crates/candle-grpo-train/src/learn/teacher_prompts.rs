//! The prompts that a teacher reads.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_base::Template;
use candle_grpo_base::column::column;
use candle_grpo_core::Invalid;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::data::plain_tokens;
use crate::data::question::{is_answer, text_messages};
use crate::data::rows::kind;
use crate::{ChatTemplate, Prompt};

/// The prompts that a teacher reads in place of the policy's.
#[derive(Debug, Clone)]
pub struct TeacherPrompts {
    source: Source,
    chat_template: Option<ChatTemplate>,
}

#[derive(Debug, Clone)]
enum Source {
    Template(Template),
    Column(String),
}

impl TeacherPrompts {
    /// Creates the prompts of a template or a column, of which there is one.
    pub(super) fn new(
        prompt: Option<&str>,
        prompt_column: Option<&str>,
        chat_template: Option<ChatTemplate>,
    ) -> Result<Self> {
        let source = match (prompt, prompt_column) {
            (Some(prompt), None) => Source::Template(Template::parse("prompt", prompt)?),
            (None, Some(column)) => Source::Column(column.to_owned()),
            (None, None) => {
                let must = "be given, or prompt_column: a teacher that reads the prompt of the policy is the policy";
                return Err(Invalid::new("prompt", "absent", must).into());
            }
            (Some(_), Some(_)) => {
                let must = "be absent with prompt";
                return Err(Invalid::new("prompt_column", "given", must).into());
            }
        };
        Ok(Self {
            source,
            chat_template,
        })
    }

    /// Returns the tokens that the teacher reads in place of `prompt`.
    ///
    /// # Errors
    ///
    /// Fails if a column is missing or has another kind, a conversation does not end with a message
    /// to replace, or a prompt has no tokens.
    pub fn tokens(&self, prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let tokens = self.try_tokens(prompt, tokenizer);
        tokens.with_context(|| format!("the teacher's prompt {}", prompt.index))
    }

    fn try_tokens(&self, prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let (mut messages, prefill) = without_prefill(prompt);
        let last = messages.last().map(|message| &message["content"]);
        let own = last.map_or(Some(prompt.text.as_str()), Value::as_str);
        let text = match &self.source {
            Source::Template(template) => {
                let own = own.context("the last message of the policy's prompt has no text")?;
                template.fill_with(&[("prompt", own)], &prompt.columns)?
            }
            Source::Column(name) => match column(&prompt.columns, name)? {
                Value::String(text) => text.clone(),
                Value::Array(given) => {
                    ensure!(
                        !messages.is_empty(),
                        "column {name:?}: messages, must be a text, as the policy's prompt is one"
                    );
                    messages = text_messages(name, given)?;
                    return self.rendered(prompt, &messages, prefill, tokenizer);
                }
                other => bail!(
                    "column {name:?}: {}, must be a text or messages",
                    kind(other)
                ),
            },
        };
        let Some(last) = messages.last_mut() else {
            return plain_tokens(&text, tokenizer);
        };
        ensure!(
            last["role"] == "user",
            "the last message of the policy's prompt has the role {}, must be user for a text to take its place",
            last["role"]
        );
        last["content"] = json!(text);
        self.rendered(prompt, &messages, prefill, tokenizer)
    }

    fn rendered(
        &self,
        prompt: &Prompt,
        messages: &[Value],
        prefill: &str,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>> {
        let template = self.chat_template.as_ref();
        let template = template.context("the model has no chat template")?;
        let chat = prompt.chat(messages).with_row(prompt.tools.as_ref(), None);
        let text = template.render(&chat)? + prefill;
        Ok(Prompt::new(prompt.index, &text, Value::Null, tokenizer)?.tokens)
    }
}

/// Returns the messages of a prompt, and the start of the answer that follows them.
fn without_prefill(prompt: &Prompt) -> (Vec<Value>, &str) {
    match prompt.messages.split_last() {
        Some((last, before)) if is_answer(last) => {
            (before.to_vec(), last["content"].as_str().unwrap_or(""))
        }
        _ => (prompt.messages.clone(), ""),
    }
}
