//! The prompts that a teacher reads.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_base::Template;
use candle_grpo_base::column::column;
use candle_grpo_core::Invalid;
use candle_grpo_core::validate::check;
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
    /// The smallest reward of a completion that the template shows, if it shows one.
    min_reward: Option<f64>,
    /// True if the template shows what the rewards said about the completion.
    shows_feedback: bool,
    chat_template: Option<ChatTemplate>,
}

/// Texts about one completion that a template shows, beside its row.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShownTexts<'a> {
    /// The text of another completion, if the template [shows one](TeacherPrompts::shows_sibling).
    pub sibling: Option<&'a str>,
    /// The feedback of the environment and the rewards, if the template [shows
    /// it](TeacherPrompts::shows_feedback).
    pub feedback: Option<&'a str>,
}

#[derive(Debug, Clone)]
enum Source {
    Template(Template),
    Column(String),
}

impl TeacherPrompts {
    /// Creates the prompts of a template or a column, of which there is one.
    pub(super) fn new(
        (prompt, prompt_column): (Option<&str>, Option<&str>),
        (min_reward, shows_feedback): (Option<f64>, bool),
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
        for (name, is_given) in [(SIBLING, min_reward.is_some()), (FEEDBACK, shows_feedback)] {
            let is_shown = match &source {
                Source::Template(template) => template.has_column(name),
                Source::Column(_) => false,
            };
            let (value, must) = if name == FEEDBACK {
                ("true", "be false")
            } else {
                ("given", "be absent")
            };
            let must = format!("{must} unless prompt contains {{{name}}}");
            check(!is_given || is_shown, name, value, must.as_str())?;
        }
        Ok(Self {
            source,
            min_reward,
            shows_feedback,
            chat_template,
        })
    }

    /// Returns whether the prompts show another completion of the group.
    pub fn shows_sibling(&self) -> bool {
        self.min_reward.is_some()
    }

    /// Returns whether the prompts show what the environment and the rewards said.
    pub fn shows_feedback(&self) -> bool {
        self.shows_feedback
    }

    /// Returns the completion that the teacher of completion `of` sees: the first with the highest
    /// reward among the others of its group, which have these rewards.
    pub(super) fn sibling(&self, of: usize, rewards: &[f32]) -> Option<usize> {
        let min_reward = self.min_reward?;
        let others = rewards.iter().enumerate();
        let others = others.filter(|&(i, &reward)| i != of && f64::from(reward) >= min_reward);
        // The last of equal ones is the first in reverse.
        let best = others.rev().max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map(|(i, _)| i)
    }

    /// Returns the tokens that the teacher reads in place of `prompt`.
    ///
    /// # Errors
    ///
    /// Fails if a column is missing or has another kind, a conversation does not end with a message
    /// to replace, or a prompt has no tokens.
    pub fn tokens(
        &self,
        prompt: &Prompt,
        shown: ShownTexts<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>> {
        let tokens = self.try_tokens(prompt, shown, tokenizer);
        tokens.with_context(|| format!("the teacher's prompt {}", prompt.index))
    }

    fn try_tokens(
        &self,
        prompt: &Prompt,
        shown: ShownTexts<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>> {
        let (mut messages, prefill) = without_prefill(prompt);
        let last = messages.last().map(|message| &message["content"]);
        let own = last.map_or(Some(prompt.text.as_str()), Value::as_str);
        let text = match &self.source {
            Source::Template(template) => {
                let own = own.context("the last message of the policy's prompt has no text")?;
                let sibling = shown.sibling.map(|text| (SIBLING, text));
                let feedback = shown.feedback.map(|text| (FEEDBACK, text));
                let texts = [("prompt", own)].into_iter().chain(sibling);
                let texts: Vec<_> = texts.chain(feedback).collect();
                template.fill_with(&texts, &prompt.columns)?
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

/// The name of the shown completion in a template.
const SIBLING: &str = "sibling";

/// The name of what the environment and the rewards said in a template.
const FEEDBACK: &str = "feedback";

/// Returns the messages of a prompt, and the start of the answer that follows them.
fn without_prefill(prompt: &Prompt) -> (Vec<Value>, &str) {
    match prompt.messages.split_last() {
        Some((last, before)) if is_answer(last) => {
            (before.to_vec(), last["content"].as_str().unwrap_or(""))
        }
        _ => (prompt.messages.clone(), ""),
    }
}
