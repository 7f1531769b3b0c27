//! Tokens before and between the policy's turns.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use super::content::ContentEncoder;
use super::{Append, TextPart};
use crate::data::plain_tokens;
use crate::model::{ANSWER, Chat};
use crate::rollout::decode::decode_tokens;
use crate::{ChatTemplate, Prompt};

/// Converts between the policy's turns and texts: renders conversations, and the text after a turn,
/// without encoding a turn again.
pub struct Conversation {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// Tokens that end a turn.
    stop_token_ids: Vec<u32>,
    encoder: ContentEncoder,
}

impl Conversation {
    /// Creates the conversions for a model with this tokenizer and chat template. A turn ends with
    /// one of `stop_token_ids`.
    pub fn new(
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

    /// Returns a turn's text without its final stop token.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer cannot decode it.
    pub fn text(&self, turn: &[u32]) -> Result<String> {
        let text = match turn.split_last() {
            Some((&last, before)) if self.is_stop(last) => before,
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
        match append {
            Append::Nothing => Ok(Vec::new()),
            Append::Text(text) => self.text_tokens(text),
            Append::Parts(parts) => self.parts(parts),
            Append::Tokens(tokens) => Ok(tokens.clone()),
            Append::Messages(messages) => {
                let (variables, has_tools) = (&prompt.variables, prompt.tools.is_some());
                self.after(messages, has_tools, variables, last)
            }
        }
    }

    /// Returns the tokens between a turn that ends with `last` and the next turn: the turn's end,
    /// `messages`, and the start of an answer.
    ///
    /// Tools and earlier messages are left out: templates place them at the beginning, where the
    /// trajectory already has them. With `has_tools`, the template for tools renders the messages.
    ///
    /// # Errors
    ///
    /// Fails if there is no chat template, or it does not render the messages.
    pub fn after(
        &self,
        messages: &[Value],
        has_tools: bool,
        variables: &Map<String, Value>,
        last: Option<u32>,
    ) -> Result<Vec<u32>> {
        let before = [
            json!({"role": "user", "content": "?"}),
            json!({"role": "assistant", "content": ANSWER}),
        ];
        let messages = self.contents(messages)?;
        let conversation: Vec<&Value> = before.iter().chain(&messages).collect();
        let chat = Chat::new(conversation).generation_prompt();
        let chat = chat.with_row(None, Some(variables)).of_tools(has_tools);
        let text = self.template()?.render_after_answer(&chat)?;
        let mut tokens = self.encoder.encode(&text)?;
        // The template ends a turn, which the policy may have done already.
        let starts_with_stop = tokens.first().is_some_and(|&first| self.is_stop(first));
        if last.is_some_and(|last| self.is_stop(last)) && starts_with_stop {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// Returns the tokens for a whole conversation and the start of an answer. Special token names
    /// become these tokens in the assistant's messages only.
    ///
    /// # Errors
    ///
    /// Fails if there is no chat template, or it does not render the messages.
    pub fn whole(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        let content = |message: &Value| {
            if message["role"] == "assistant" {
                Ok(message.clone())
            } else {
                self.encoder.contents(message)
            }
        };
        let messages = messages.iter().map(content).collect::<Result<Vec<_>>>()?;
        let chat = Chat::new(messages).generation_prompt();
        let chat = chat.with_row(tools, Some(variables));
        self.encoder.encode(&self.template()?.render(&chat)?)
    }

    /// Returns a text's tokens, where special token names become these tokens. At the beginning of
    /// a sequence, the tokenizer adds its own prefix, such as BOS.
    ///
    /// # Errors
    ///
    /// Fails if a text at the beginning has no tokens, or the tokenizer cannot encode it.
    pub fn markup(&self, text: &str, at_beginning: bool) -> Result<Vec<u32>> {
        if at_beginning {
            plain_tokens(text, &self.tokenizer)
        } else {
            self.encoder.encode(text)
        }
    }

    /// Returns true if a token ends a turn.
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_token_ids.contains(&token)
    }

    /// Decodes tokens to text, including special token names.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        decode_tokens(tokens, &self.tokenizer)
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
