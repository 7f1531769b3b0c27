//! Environment tokens between policy turns.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::content::ContentEncoder;
use super::{Append, TextPart};
use crate::model::ANSWER;
use crate::rollout::decode::decode_tokens;
use crate::{ChatTemplate, Prompt};

/// Converts between policy turns and text.
pub(super) struct Conversation {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// Tokens that end a turn.
    stop_token_ids: Vec<u32>,
    encoder: ContentEncoder,
}

impl Conversation {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        stop_token_ids: Vec<u32>,
    ) -> Self {
        Self {
            encoder: ContentEncoder::new(Arc::clone(&tokenizer)),
            tokenizer,
            template,
            stop_token_ids,
        }
    }

    pub(super) fn allow_special_tokens(&mut self) {
        self.encoder.allow_special_tokens();
    }

    /// A turn's text without the stop token at its end.
    pub(super) fn text(&self, turn: &[u32]) -> Result<String> {
        let text = match turn.split_last() {
            Some((last, before)) if self.stop_token_ids.contains(last) => before,
            _ => turn,
        };
        decode_tokens(text, &self.tokenizer)
    }

    /// A prompt's tokens, followed by `append`.
    pub(super) fn prompt(&self, prompt: &Prompt, append: &Append) -> Result<Vec<u32>> {
        let more = match append {
            Append::Nothing => Vec::new(),
            Append::Text(text) => self.text_tokens(text)?,
            Append::Parts(parts) => self.parts(parts)?,
            Append::Tokens(tokens) => tokens.clone(),
            Append::Messages(messages) => {
                ensure!(
                    !prompt.messages.is_empty(),
                    "messages: given, but the prompt is a plain text; answer with a text or tokens"
                );
                let messages = self.contents(messages)?;
                let messages: Vec<&Value> = prompt.messages.iter().chain(&messages).collect();
                let chat = prompt.chat(messages).with_row(prompt.tools.as_ref(), None);
                return self.encoder.encode(&self.template()?.render(&chat)?);
            }
        };
        Ok([prompt.tokens.as_slice(), &more].concat())
    }

    /// The tokens for `append` after a turn whose last token is `last`.
    pub(super) fn between(
        &self,
        prompt: &Prompt,
        append: &Append,
        last: Option<u32>,
    ) -> Result<Vec<u32>> {
        let messages = match append {
            Append::Nothing => return Ok(Vec::new()),
            Append::Text(text) => return self.text_tokens(text),
            Append::Parts(parts) => return self.parts(parts),
            Append::Tokens(tokens) => return Ok(tokens.clone()),
            Append::Messages(messages) => messages,
        };
        let mut tokens = self
            .encoder
            .encode(&self.after_turn(prompt, &self.contents(messages)?)?)?;
        // The template ends a turn, but the policy may already have done so.
        let is_stop = |token: &u32| self.stop_token_ids.contains(token);
        if last.as_ref().is_some_and(is_stop) && tokens.first().is_some_and(is_stop) {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// The text that a template writes between one turn's text and the next.
    ///
    /// Tools and earlier messages are left out: templates put them at the beginning, where the
    /// trajectory already has them.
    fn after_turn(&self, prompt: &Prompt, messages: &[Value]) -> Result<String> {
        let before = [
            json!({"role": "user", "content": "?"}),
            json!({"role": "assistant", "content": ANSWER}),
        ];
        let conversation: Vec<&Value> = before.iter().chain(messages).collect();
        let chat = prompt.chat(conversation).of_tools(prompt.tools.is_some());
        self.template()?.render_after_answer(&chat)
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().context(
            "messages: given, but the model has no chat template; answer with a text or tokens",
        )
    }

    fn contents(&self, messages: &[Value]) -> Result<Vec<Value>> {
        let messages = messages.iter();
        messages
            .map(|message| self.encoder.contents(message))
            .collect()
    }

    fn text_tokens(&self, text: &str) -> Result<Vec<u32>> {
        self.encoder.encode(&self.encoder.content(text)?)
    }

    fn parts(&self, parts: &[TextPart]) -> Result<Vec<u32>> {
        let parts = parts.iter().map(|part| match part {
            TextPart::Markup(text) => Ok(text.clone()),
            TextPart::Content(text) => self.encoder.content(text),
        });
        self.encoder.encode(&parts.collect::<Result<String>>()?)
    }
}
