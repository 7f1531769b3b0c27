//! Prompts as tokens.

use anyhow::{Result, anyhow, ensure};
use serde::Serialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::model::Chat;

/// A prompt and the data row that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Position in the data set. Together with the seed, it determines the random numbers for its
    /// completions.
    pub index: u64,
    /// The text.
    pub text: String,
    /// The tokens in the text.
    pub tokens: Vec<u32>,
    /// The conversation that the text renders, for a reward that renders it with another chat
    /// template; empty for plain text. If there is an answer prefix, it is the last message.
    pub messages: Vec<Value>,
    /// Tool schemas rendered in the text, for a chat template.
    pub tools: Option<Value>,
    /// Chat template variables rendered in the text, in addition to the run's.
    pub variables: Map<String, Value>,
    /// All columns in the row, for the reward function (the right answer, for example).
    pub columns: Value,
}

impl Prompt {
    /// Encodes `text` with `tokenizer` without adding special tokens, since a rendered chat already
    /// has them.
    ///
    /// # Errors
    ///
    /// Fails if the text has no tokens or the tokenizer cannot encode it.
    pub fn new(index: u64, text: &str, columns: Value, tokenizer: &Tokenizer) -> Result<Self> {
        let encoding = tokenizer.encode(text, false);
        let encoding = encoding.map_err(|_| anyhow!("prompt {index}: {}", no_token(text)))?;
        let tokens = encoding.get_ids().to_vec();
        Self::of_tokens(index, text, columns, tokens)
    }

    /// Encodes plain text, after the special tokens that the tokenizer puts before a text, such as
    /// BOS. As in transformers, they are added even if the text already has them.
    ///
    /// Special tokens that the tokenizer puts after a text, such as EOS, are left out, because a
    /// completion follows.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
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
    #[must_use]
    pub fn with_messages(self, messages: Vec<Value>) -> Self {
        Self { messages, ..self }
    }

    /// Sets [`Self::tools`].
    #[must_use]
    pub fn with_tools(self, tools: Option<Value>) -> Self {
        Self { tools, ..self }
    }

    /// Sets [`Self::variables`].
    #[must_use]
    pub fn with_variables(self, variables: Map<String, Value>) -> Self {
        Self { variables, ..self }
    }

    /// `messages` with the prompt's variables, before the start of an answer.
    pub(crate) fn chat(&self, messages: impl Serialize) -> Chat {
        let chat = Chat::new(messages).generation_prompt();
        chat.with_row(None, Some(&self.variables))
    }

    /// Returns the number of tokens in the longest prompt; 0 without prompts.
    pub fn longest(prompts: &[Self]) -> usize {
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        lengths.max().unwrap_or(0)
    }
}

/// Returns the tokens in plain text, after those that the tokenizer puts before a text.
///
/// # Errors
///
/// Fails if the text has no tokens or the tokenizer cannot encode it.
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
