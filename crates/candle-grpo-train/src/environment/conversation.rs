//! Tokens of an environment between the turns of a policy.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::Append;
use crate::model::Chat;
use crate::rollout::decode::decode_with_special_tokens;
use crate::{ChatTemplate, Prompt};

/// A text that stands for a turn of the policy where a template is rendered. No template changes
/// it.
const TURN: &str = "TurnOfThePolicy7316";

/// Converts between the turns of a policy and texts.
pub(super) struct Conversation {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// The tokens that end a turn.
    stop_token_ids: Vec<u32>,
}

impl Conversation {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        stop_token_ids: Vec<u32>,
    ) -> Self {
        Self {
            tokenizer,
            template,
            stop_token_ids,
        }
    }

    /// The text of a turn without the stop token at its end.
    pub(super) fn text(&self, turn: &[u32]) -> Result<String> {
        let text = match turn.split_last() {
            Some((last, before)) if self.stop_token_ids.contains(last) => before,
            _ => turn,
        };
        decode_with_special_tokens(text, &self.tokenizer)
    }

    /// The tokens of a prompt with `append` after it.
    pub(super) fn prompt(&self, prompt: &Prompt, append: &Append) -> Result<Vec<u32>> {
        let more = match append {
            Append::Nothing => Vec::new(),
            Append::Text(text) => self.encode(text)?,
            Append::Tokens(tokens) => tokens.clone(),
            Append::Messages(messages) => {
                ensure!(
                    !prompt.messages.is_empty(),
                    "messages: given, but the prompt is a plain text; answer with a text or tokens"
                );
                let messages: Vec<&Value> = prompt.messages.iter().chain(messages).collect();
                let chat = Chat::new(messages).generation_prompt();
                let chat = match &prompt.tools {
                    Some(tools) => chat.tools(tools),
                    None => chat,
                };
                return self.encode(&self.template()?.render(&chat)?);
            }
        };
        Ok([prompt.tokens.as_slice(), &more].concat())
    }

    /// The tokens of `append` after a turn whose last token is `last`.
    pub(super) fn between(&self, append: &Append, last: Option<u32>) -> Result<Vec<u32>> {
        let messages = match append {
            Append::Nothing => return Ok(Vec::new()),
            Append::Text(text) => return self.encode(text),
            Append::Tokens(tokens) => return Ok(tokens.clone()),
            Append::Messages(messages) => messages,
        };
        let mut tokens = self.encode(&self.after_turn(messages)?)?;
        // The template ends a turn, which the policy may have done already.
        let is_stop = |token: &u32| self.stop_token_ids.contains(token);
        if last.as_ref().is_some_and(is_stop) && tokens.first().is_some_and(is_stop) {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// The text that a template writes between the text of a turn and that of the next one.
    ///
    /// Tools and the messages before are left out: templates place them at the beginning, where the
    /// trajectory has them already.
    fn after_turn(&self, messages: &[Value]) -> Result<String> {
        let before = [
            json!({"role": "user", "content": "?"}),
            json!({"role": "assistant", "content": TURN}),
        ];
        let conversation: Vec<&Value> = before.iter().chain(messages).collect();
        let chat = Chat::new(conversation).generation_prompt();
        let text = self.template()?.render(&chat)?;
        let (_, after) = text
            .split_once(TURN)
            .context("chat template: changes or leaves out the content of the assistant")?;
        Ok(after.to_owned())
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().context(
            "messages: given, but the model has no chat template; answer with a text or tokens",
        )
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode(text, false)
            .map_err(|_| anyhow!("{text:?}: the tokenizer has no token for a part of it"))?;
        Ok(encoding.get_ids().to_vec())
    }
}
