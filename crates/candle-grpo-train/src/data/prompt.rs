//! Prompts as tokens.

use anyhow::{Result, anyhow, ensure};
use serde_json::Value;
use tokenizers::Tokenizer;

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
    /// All columns of the row, for the reward function (the right answer, for example).
    pub columns: Value,
}

impl Prompt {
    /// Encodes `text` with `tokenizer`, without adding special tokens.
    ///
    /// # Errors
    ///
    /// If the text has no tokens or the tokenizer cannot encode it.
    pub fn new(index: u64, text: &str, columns: Value, tokenizer: &Tokenizer) -> Result<Self> {
        let encoding = tokenizer.encode(text, false).map_err(|_| {
            anyhow!("prompt {index}: {text:?}, the tokenizer has no token for a part of it")
        })?;
        let tokens = encoding.get_ids().to_vec();
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
}
