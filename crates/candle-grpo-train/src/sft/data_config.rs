//! The data section of supervised training.

use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::dataset::{check_variables, template};
use crate::data::sources::Sources;
use crate::one_or_more::one_or_more;

/// The data section of supervised training: files, and how their rows become tokens.
///
/// A row is a conversation, a prompt with its completion, or a text: by the key of `messages`,
/// `prompt`, `completion` and `text` that is given, or else by its first column of the same name.
/// The column `conversations` is a conversation, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SftDataConfig {
    /// Files of JSON lines (or one JSON array), CSV or Parquet to train on: one, or a list. A file
    /// of a data set on the [hub](guide.md#the-hugging-face-hub) is
    /// `hf://datasets/ORG/NAME/FILE`.
    #[serde(deserialize_with = "one_or_more")]
    pub train: Vec<PathBuf>,
    /// Files to evaluate on: one, or a list.
    #[serde(deserialize_with = "one_or_more")]
    pub held_out: Vec<PathBuf>,
    /// Number of rows of `train` to hold out, drawn by the seed; not together with `held_out`.
    pub held_out_rows: Option<usize>,
    /// The column of a conversation: a list of messages with `role` and `content`, or with `from`
    /// and `value` (ShareGPT). Absent: `messages` or `conversations`.
    pub messages: Option<String>,
    /// The prompt of a row, with `{column}` for its columns; absent: the columns `prompt` (a text
    /// or messages), `question` (GSM8K), or `Body` and `Question` (SVAMP).
    pub prompt: Option<String>,
    /// The answer to the prompt, with `{column}` for columns. Absent: the column `completion`, a
    /// text or messages.
    pub completion: Option<String>,
    /// A text that trains as a whole, with `{column}` for columns. Absent: the column `text`.
    pub text: Option<String>,
    /// The system message before the conversation or the prompt, unless it has one.
    pub system: Option<String>,
    /// If true, prompt and completion are messages for the chat template of the model; if false,
    /// texts that follow each other. Absent: messages, except a text in the column `prompt`.
    pub chat: Option<bool>,
    /// Variables of the chat template, such as `{enable_thinking: false}`. Those in a column
    /// `chat_template_kwargs` come first.
    pub chat_template_kwargs: Map<String, Value>,
    /// The column with the schemas of the tools of a conversation: a list, or its JSON text.
    pub tools: String,
    /// The column with the weight of a row in the loss: a number of at least 0. Rows of weight 0
    /// are left out. Absent: all rows have the weight 1.
    pub weight: Option<String>,
    /// Tokens that train: `answers`, `last_answer` or `all`. Texts train as a whole.
    pub train_on: TrainOn,
    /// If true, a row that is not rendered by the chat template ends with the first stop token of
    /// the model.
    pub append_eos: bool,
    /// The longest row in tokens. Absent: 1024, or the positions of the model if these are fewer.
    pub max_length: Option<usize>,
    /// Treatment of longer rows: `drop` leaves them out, `truncate` cuts their ends off.
    pub truncation: Truncation,
    /// Shares of the rows of a run that come from the files of `train`, one for each file, such
    /// as `[0.7, 0.3]`. The rows of a file come in random order, again after the last one. Absent:
    /// all rows are one set.
    pub weights: Option<Vec<f64>>,
    /// Greatest number of rows of each file.
    pub max_rows: Option<usize>,
}

/// The tokens of a conversation that train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// The messages of the assistant with the token that ends them; of a row with a prompt those of
    /// its completion.
    #[default]
    Answers,
    /// The last message of the assistant.
    LastAnswer,
    /// All tokens.
    All,
}

/// The treatment of rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// They are left out.
    #[default]
    Drop,
    /// Their ends are cut off. Rows that have no token to train then are left out.
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
    /// If keys contradict each other or a template is not valid.
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
