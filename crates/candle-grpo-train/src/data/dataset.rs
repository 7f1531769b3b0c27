//! The data of a run.

use std::collections::HashSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use candle_grpo_core::selection::DifficultyPools;
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::MixedOrder;
use super::curriculum;
use super::question::{Asking, Question};
use super::rows::Row;
use super::sources::Sources;
use crate::canonical_json::canonical_json;
use crate::model::Chat;
use crate::one_or_more::one_or_more;
use candle_grpo_base::Template;
use candle_grpo_base::within;

/// The data section of a configuration: files, and how their rows become prompts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DatasetConfig {
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
    /// The prompt of a row, with `{column}` for its columns; absent: the columns `messages`,
    /// `prompt`, `conversations` (ShareGPT), `question` (GSM8K), or `Body` and `Question` (SVAMP).
    pub prompt: Option<String>,
    /// The system message before the prompt.
    pub system: Option<String>,
    /// If true, the prompt is a message for the chat template of the model; if false, a text that
    /// the model continues. Absent: all are messages, except a text in the column `prompt`.
    pub chat: Option<bool>,
    /// The beginning of the model's answer, with `{column}` for columns.
    pub prefill: Option<String>,
    /// Variables of the chat template, such as `{enable_thinking: false}`; the name is that of TRL
    /// and vLLM. They apply to training, evaluation and environments.
    pub chat_template_kwargs: Map<String, Value>,
    /// If true, messages of the assistant at the end of a conversation (as in data for supervised
    /// training) are cut off; if false, they are an error.
    pub cut_answer: bool,
    /// Shares of the prompts of a run that come from the files of `train`, one for each file, such
    /// as `[0.7, 0.3]`. The rows of a file come in random order, again after the last one. Absent:
    /// all rows are one set.
    pub weights: Option<Vec<f64>>,
    /// Draws prompts by how well the policy solves them, in place of a random order: pools by the
    /// mean reward of the latest group of a prompt, each with a weight
    /// ([how](guide.md#a-curriculum)). Not together with `weights`.
    pub curriculum: Option<DifficultyPools>,
    /// Greatest number of rows of each file.
    pub max_rows: Option<usize>,
}

/// The SHA-256 of a question.
type Digest = [u8; 32];

/// The rows of a run.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The rows to train on, in the order of the files.
    pub train: Vec<Row>,
    /// The rows to evaluate on, possibly none.
    pub held_out: Vec<Row>,
    /// The number of rows of `held_out` that ask the same as a row of `train`.
    pub held_out_in_train: usize,
    asking: Asking,
    prefill: Option<Template>,
}

impl DatasetConfig {
    /// Checks the keys. Opens no file.
    ///
    /// # Errors
    ///
    /// If keys contradict each other or a template is not valid.
    pub fn validate(&self) -> Result<()> {
        self.sources().validate()?;
        if let Some(pools) = &self.curriculum {
            curriculum::validate(pools).map_err(|error| within("curriculum", error))?;
            let is_free = self.weights.is_none();
            check(is_free, "curriculum", "given", "be absent with weights")?;
        }
        check_variables(&self.chat_template_kwargs)?;
        self.asking()?;
        self.prefill()?;
        Ok(())
    }

    fn asking(&self) -> Result<Asking> {
        Ok(Asking {
            prompt: template("prompt", self.prompt.as_deref())?,
            system: self.system.clone(),
            chat: self.chat,
            cut_answer: self.cut_answer,
        })
    }

    fn prefill(&self) -> Result<Option<Template>> {
        template("prefill", self.prefill.as_deref())
    }

    /// Reads the files. `seed` decides which rows are held out.
    ///
    /// # Errors
    ///
    /// With file and line if something cannot be read, or a row has no prompt. If rows that differ
    /// all ask the same, or all rows that are held out are trained on too.
    pub fn load(&self, seed: u64) -> Result<Dataset> {
        self.validate()?;
        let (train, held_out) = self.sources().read(seed)?;
        let mut dataset = Dataset {
            train,
            held_out,
            held_out_in_train: 0,
            asking: self.asking()?,
            prefill: self.prefill()?,
        };
        dataset.held_out_in_train = dataset.compare_questions()?;
        let held_out = dataset.held_out.len();
        ensure!(
            held_out == 0 || dataset.held_out_in_train < held_out,
            "data.{}: all {held_out} rows ask the same as rows of train, there must be other ones",
            match self.held_out_rows {
                Some(_) => "held_out_rows",
                None => "held_out",
            }
        );
        Ok(dataset)
    }

    /// Returns the order of prompts. `sources` has the number of the file in `train` of each.
    ///
    /// # Errors
    ///
    /// If there are none, or none of a file that has a weight.
    pub fn order(&self, sources: &[usize], seed: u64) -> Result<MixedOrder> {
        self.sources().order(sources, seed)
    }

    fn sources(&self) -> Sources<'_> {
        Sources {
            train: &self.train,
            held_out: &self.held_out,
            held_out_rows: self.held_out_rows,
            weights: self.weights.as_deref(),
            max_rows: self.max_rows,
        }
    }
}

/// Checks variables of a chat template for all rows.
pub(crate) fn check_variables(variables: &Map<String, Value>) -> Result<()> {
    for name in Chat::RESERVED {
        let field = format!("chat_template_kwargs.{name}");
        let is_free = !variables.contains_key(name);
        check(is_free, &field, "given", "be absent: the prompt sets it")?;
    }
    Ok(())
}

pub(crate) fn template(field: &str, text: Option<&str>) -> Result<Option<Template>> {
    text.map(|text| Template::parse(field, text)).transpose()
}

impl Dataset {
    /// Creates a data set without rows, for questions of other rows.
    ///
    /// # Errors
    ///
    /// If a template of `config` is not valid.
    pub fn without_rows(config: &DatasetConfig) -> Result<Self> {
        Ok(Self {
            train: Vec::new(),
            held_out: Vec::new(),
            held_out_in_train: 0,
            asking: config.asking()?,
            prefill: config.prefill()?,
        })
    }

    /// Makes every question, and returns how many of those held out are trained on too.
    fn compare_questions(&self) -> Result<usize> {
        let digests = |rows: &[Row]| -> Result<Vec<Digest>> {
            rows.iter().map(|row| self.digest(row)).collect()
        };
        let (train, held_out) = (digests(&self.train)?, digests(&self.held_out)?);
        let trained: HashSet<&Digest> = train.iter().collect();
        let differ = |rows: &[Row]| {
            rows.windows(2)
                .any(|pair| pair[0].columns != pair[1].columns)
        };
        ensure!(
            trained.len() > 1 || !differ(&self.train),
            "data.prompt: the same for all {} rows, must have the columns in which they differ",
            self.train.len()
        );
        Ok(held_out.iter().filter(|row| trained.contains(row)).count())
    }

    fn digest(&self, row: &Row) -> Result<Digest> {
        let mut hash = Sha256::new();
        match self.question(row)? {
            Question::Text(text) => hash.update(text),
            Question::Messages(messages) => hash.update(canonical_json(&Value::from(messages))),
        }
        hash.update(self.prefill(row)?);
        Ok(hash.finalize().into())
    }

    /// An id of the question of a row: the first 16 hexadecimal digits of its SHA-256.
    ///
    /// # Errors
    ///
    /// If the row has no question.
    pub fn question_id(&self, row: &Row) -> Result<String> {
        let digest = self.digest(row)?;
        let digits = digest[..8].iter().map(|byte| format!("{byte:02x}"));
        Ok(digits.collect())
    }

    /// The question of a row.
    pub fn question(&self, row: &Row) -> Result<Question> {
        self.asking.question(row)
    }

    /// The beginning of the answer to a row; empty, unless the configuration gives one.
    pub fn prefill(&self, row: &Row) -> Result<String> {
        match &self.prefill {
            Some(template) => template.fill(&row.columns).with_context(|| row.place()),
            None => Ok(String::new()),
        }
    }
}
