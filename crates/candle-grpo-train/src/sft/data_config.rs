//! The data section for supervised training.

use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::dataset::{check_variables, template};
use crate::data::sources::Sources;
use crate::one_or_more::one_or_more;

/// The data section for supervised training: files, and how their rows become tokens.
///
/// A row is a conversation, a prompt with its completion, or text. This depends on which of the
/// keys `messages`, `prompt`, `completion` and `text` you set, or else on the row's first column
/// with such a name. The column `conversations` is a conversation, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SftDataConfig {
    /// Files to train on, one or a list: JSON lines (or one JSON array), CSV or Parquet. Write
    /// `hf://datasets/ORG/NAME/FILE` for a file in a data set on the
    /// [hub](guide.md#the-hugging-face-hub).
    #[serde(deserialize_with = "one_or_more")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<crate::one_or_more::Texts<PathBuf>>")
    )]
    pub train: Vec<PathBuf>,
    /// Files to evaluate on, one or a list.
    #[serde(deserialize_with = "one_or_more")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<crate::one_or_more::Texts<PathBuf>>")
    )]
    pub held_out: Vec<PathBuf>,
    /// Number of `train` rows to hold out, sampled by the seed; not together with `held_out`.
    pub held_out_rows: Option<usize>,
    /// Conversation column: a list of messages with `role` and `content`, or with `from` and
    /// `value` (ShareGPT). Absent: `messages` or `conversations`.
    pub messages: Option<String>,
    /// Prompt template for a row, with `{column}` for its columns. Absent: the columns `prompt`
    /// (text or messages), `question` (GSM8K), or `Body` and `Question` (SVAMP).
    pub prompt: Option<String>,
    /// Answer to the prompt, with `{column}` for columns. Absent: the column `completion`, text or
    /// messages.
    pub completion: Option<String>,
    /// Text that trains as a whole, with `{column}` for columns. Absent: the column `text`.
    pub text: Option<String>,
    /// System message before the conversation or prompt, unless it has one.
    pub system: Option<String>,
    /// If true, prompt and completion are messages for the model's chat template; if false, text
    /// that follows each other. Absent: messages, except text in the column `prompt`.
    pub chat: Option<bool>,
    /// Chat template variables, such as `{enable_thinking: false}`. Those in a column
    /// `chat_template_kwargs` take precedence.
    pub chat_template_kwargs: Map<String, Value>,
    /// Column with a conversation's tool schemas: a list, or its JSON text.
    pub tools: String,
    /// Column with a row's weight in the loss: a number of at least 0. Rows with weight 0 are left
    /// out. Absent: all rows have weight 1.
    pub weight: Option<String>,
    /// Tokens that train: `answers`, `last_answer` or `all`. Text trains as a whole.
    pub train_on: TrainOn,
    /// If true, a row that the chat template does not render ends with the model's first stop
    /// token.
    pub append_eos: bool,
    /// Maximum row length in tokens. Absent: 1024, or the model's maximum if that is less.
    pub max_length: Option<usize>,
    /// Treatment of longer rows: `drop` leaves them out, `truncate` cuts off their ends.
    pub truncation: Truncation,
    /// Shares of the run's rows that come from each `train` file, such as `[0.7, 0.3]`. Rows in a
    /// file come in random order, and repeat after the last one. Absent: all rows form one set.
    pub weights: Option<Vec<f64>>,
    /// Maximum number of rows per file.
    pub max_rows: Option<usize>,
}

/// The tokens in a conversation that train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TrainOn {
    /// Assistant messages, each with the token that ends it; in a row with a prompt, those in its
    /// completion.
    #[default]
    Answers,
    /// The last assistant message.
    LastAnswer,
    /// All tokens.
    All,
}

/// Treatment of rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Truncation {
    /// They are left out.
    #[default]
    Drop,
    /// Their ends are cut off. Rows that then have no token to train on are left out.
    Truncate,
}

impl Default for SftDataConfig {
    fn default() -> Self {
        Self {
            train: Vec::new(),
            held_out: Vec::new(),
            held_out_rows: None,
            messages: None,
            prompt: None,
            completion: None,
            text: None,
            system: None,
            chat: None,
            chat_template_kwargs: Map::new(),
            tools: "tools".to_owned(),
            weight: None,
            train_on: TrainOn::default(),
            append_eos: true,
            max_length: None,
            truncation: Truncation::default(),
            weights: None,
            max_rows: None,
        }
    }
}

impl SftDataConfig {
    /// Checks the keys. Opens no file.
    ///
    /// # Errors
    ///
    /// If keys contradict each other or a template is invalid.
    pub fn validate(&self) -> Result<()> {
        self.sources().validate()?;
        at_least_one("max_length", self.max_length.unwrap_or(1))?;
        check_variables(&self.chat_template_kwargs)?;
        let asks = self.prompt.is_some() || self.completion.is_some();
        let given = "given";
        if self.text.is_some() {
            let must = "be absent with text, which is the whole row";
            check(!asks, "completion", given, must)?;
            check(self.messages.is_none(), "messages", given, must)?;
            check(self.system.is_none(), "system", given, must)?;
        }
        let must = "be absent with messages, which has the answers";
        check(self.messages.is_none() || !asks, "completion", given, must)?;
        for (field, text) in [
            ("prompt", &self.prompt),
            ("completion", &self.completion),
            ("text", &self.text),
        ] {
            template(field, text.as_deref())?;
        }
        Ok(())
    }

    pub(super) fn sources(&self) -> Sources<'_> {
        Sources {
            train: &self.train,
            held_out: &self.held_out,
            held_out_rows: self.held_out_rows,
            weights: self.weights.as_deref(),
            max_rows: self.max_rows,
        }
    }
}
