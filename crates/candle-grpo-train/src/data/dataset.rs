//! A run's data.

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

/// The data section in a configuration: files, and how their rows become prompts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DatasetConfig {
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
    /// Prompt template for a row, with `{column}` for its columns. Absent: the columns `messages`,
    /// `prompt`, `conversations` (ShareGPT), `question` (GSM8K), or `Body` and `Question` (SVAMP).
    pub prompt: Option<String>,
    /// System message before the prompt.
    pub system: Option<String>,
    /// If true, the prompt is a message for the model's chat template; if false, text for the
    /// model to continue. Absent: everything is a message, except text in the column `prompt`.
    pub chat: Option<bool>,
    /// Prefix for the model's answer, with `{column}` for columns.
    pub prefill: Option<String>,
    /// Chat template variables, such as `{enable_thinking: false}`; TRL and vLLM use the same
    /// name. They apply to training, evaluation and environments.
    pub chat_template_kwargs: Map<String, Value>,
    /// If true, assistant messages at the end of a conversation (as in data for supervised
    /// training) are cut off; if false, they are an error.
    pub cut_answer: bool,
    /// Shares of the run's prompts that come from each `train` file, such as `[0.7, 0.3]`. Rows in
    /// a file come in random order, and repeat after the last one. Absent: all rows form one set.
    pub weights: Option<Vec<f64>>,
    /// Samples prompts by how well the policy solves them, instead of in random order. Prompts are
    /// divided into pools by their latest group's mean reward, and each pool has a weight
    /// ([how](guide.md#a-curriculum)). Not together with `weights`.
    pub curriculum: Option<DifficultyPools>,
    /// Maximum number of rows per file.
    pub max_rows: Option<usize>,
}

/// A question's SHA-256.
type Digest = [u8; 32];

/// A run's rows.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// Rows to train on, in file order.
    pub train: Vec<Row>,
    /// Rows to evaluate on, possibly none.
    pub held_out: Vec<Row>,
    /// Number of `held_out` rows that ask the same as a `train` row.
    pub held_out_in_train: usize,
    asking: Asking,
    prefill: Option<Template>,
}

impl DatasetConfig {
    /// Checks the keys. Opens no file.
    ///
    /// # Errors
    ///
    /// Fails if keys contradict each other or a template is invalid.
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
    /// Fails if something cannot be read, or a row has no prompt, with file and line. If different
    /// rows all ask the same, or all held-out rows are also trained on.
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

    /// Returns the prompt order. `sources` has the index in `train` of each prompt's file.
    ///
    /// # Errors
    ///
    /// Fails if there are no prompts, or none from a file that has a weight.
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

/// Checks chat template variables that apply to all rows.
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
    /// Creates a data set without rows, for asking questions from other rows.
    ///
    /// # Errors
    ///
    /// Fails if a template in `config` is invalid.
    pub fn without_rows(config: &DatasetConfig) -> Result<Self> {
        Ok(Self {
            train: Vec::new(),
            held_out: Vec::new(),
            held_out_in_train: 0,
            asking: config.asking()?,
            prefill: config.prefill()?,
        })
    }

    /// Builds every question, and returns how many held-out ones are also trained on.
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

    /// An id for a row's question: the first 16 hexadecimal digits of its SHA-256.
    ///
    /// # Errors
    ///
    /// Fails if the row has no question.
    pub fn question_id(&self, row: &Row) -> Result<String> {
        let digest = self.digest(row)?;
        let digits = digest[..8].iter().map(|byte| format!("{byte:02x}"));
        Ok(digits.collect())
    }

    /// A row's question.
    pub fn question(&self, row: &Row) -> Result<Question> {
        self.asking.question(row)
    }

    /// The prefix for a row's answer; empty unless configured.
    pub fn prefill(&self, row: &Row) -> Result<String> {
        match &self.prefill {
            Some(template) => template.fill(&row.columns).with_context(|| row.place()),
            None => Ok(String::new()),
        }
    }
}
