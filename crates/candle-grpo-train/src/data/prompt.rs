//! Prompts as tokens.

use anyhow::{Result, anyhow, ensure};
use serde::Serialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::model::Chat;

/// A prompt and the row of the data set that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Its position in the data set. With the seed it determines the random numbers of its
    /// completions.
    pub index: u64,
    /// The text.
    pub text: String,
    /// The tokens of the text.
    pub tokens: Vec<u32>,
    /// The conversation that the text renders, for a reward that renders it with another chat
    /// template; empty for a plain text. The beginning of an answer is its last message.
    pub messages: Vec<Value>,
    /// The schemas of the tools that the text renders, for a chat template.
    pub tools: Option<Value>,
    /// The variables of the chat template that the text renders, in addition to those of the run.
    pub variables: Map<String, Value>,
    /// All columns of the row, for the reward function (the right answer, for example).
    pub columns: Value,
}

impl Prompt {
    /// Encodes `text` with `tokenizer`, without adding special tokens: a rendered chat has them.
    ///
    /// # Errors
    ///
    /// If the text has no tokens or the tokenizer cannot encode it.
    pub fn new(index: u64, text: &str, columns: Value, tokenizer: &Tokenizer) -> Result<Self> {
        let encoding = tokenizer.encode(text, false);
        let encoding = encoding.map_err(|_| anyhow!("prompt {index}: {}", no_token(text)))?;
        let tokens = encoding.get_ids().to_vec();
        Self::of_tokens(index, text, columns, tokens)
    }

    /// Encodes a plain text, after the special tokens that the tokenizer puts before a text, such
    /// as BOS. As in transformers, it adds them also to a text that has them already.
    ///
    /// Special tokens that the tokenizer puts after a text, such as EOS, are left out: a completion
    /// follows.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn plain(index: u64, text: &str, columns: Value, tokenizer: &Tokenizer) -> Result<Self> {
        let tokens = plain_tokens(text, tokenizer);
        let tokens = tokens.map_err(|error| anyhow!("prompt {index}: {error}"))?;
        Self::of_tokens(index, text, columns, tokens)
    }

    fn of_tokens(index: u64, text: &str, columns: Value, tokens: Vec<u32>) -> Result<Self> {
        ensure!(
            !tokens.is_empty(),
            "prompt {index}: {text:?} has no tokens, it must have at least one"
        );
        Ok(Self {
            index,
            text: text.to_owned(),
            tokens,
            messages: Vec::new(),
            tools: None,
            variables: Map::new(),
            columns,
        })
    }

    /// Sets [`Self::messages`].
    pub fn with_messages(self, messages: Vec<Value>) -> Self {
        Self { messages, ..self }
    }

    /// Sets [`Self::tools`].
    pub fn with_tools(self, tools: Option<Value>) -> Self {
        Self { tools, ..self }
    }

    /// Sets [`Self::variables`].
    pub fn with_variables(self, variables: Map<String, Value>) -> Self {
        Self { variables, ..self }
    }

    /// `messages` with the variables of the prompt, before the beginning of an answer.
    pub(crate) fn chat(&self, messages: impl Serialize) -> Chat {
        let chat = Chat::new(messages).generation_prompt();
        chat.with_row(None, Some(&self.variables))
    }

    /// Returns the number of tokens of the longest of `prompts`; 0 without prompts.
    pub fn longest(prompts: &[Self]) -> usize {
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        lengths.max().unwrap_or(0)
    }
}

/// Returns the tokens of a plain text, after those that the tokenizer puts before a text.
///
/// # Errors
///
/// If the text has no tokens or the tokenizer cannot encode it.
pub(crate) fn plain_tokens(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, true);
    let encoding = encoding.map_err(|_| anyhow!(no_token(text)))?;
    let added = encoding.get_special_tokens_mask();
    let end = added.iter().rposition(|&added| added == 0);
    let end = end.ok_or_else(|| anyhow!("{text:?} has no tokens, it must have at least one"))?;
    Ok(encoding.get_ids()[..=end].to_vec())
}

fn no_token(text: &str) -> String {
    format!("{text:?}, the tokenizer has no token for a part of it")
}
