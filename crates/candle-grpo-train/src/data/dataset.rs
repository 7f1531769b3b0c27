//! Which files a run trains on, and how.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Deserializer, Serialize};

use super::question::{Asking, Question};
use super::rows::{Row, read_rows};
use super::template::Template;
use crate::ShuffledOrder;

/// Which files a run trains on, and how their rows become prompts: the data section of a configuration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DatasetConfig {
    /// Files of JSON lines (or one JSON array) to train on: one, or a list.
    #[serde(deserialize_with = "one_or_more")]
    pub train: Vec<PathBuf>,
    /// Files to evaluate on: one, or a list.
    #[serde(deserialize_with = "one_or_more")]
    pub held_out: Vec<PathBuf>,
    /// How many rows of `train` are held out, drawn by the seed; not together with `held_out`.
    pub held_out_rows: Option<usize>,
    /// The prompt of a row, with `{column}` for its columns; absent: the columns `messages`, `prompt`, `question` (GSM8K), or
    /// `Body` and `Question` (SVAMP).
    pub prompt: Option<String>,
    /// The system message that comes before the prompt.
    pub system: Option<String>,
    /// Whether the prompt is a message to the chat template of the model, or the text that the model goes on with; absent: all but
    /// a text in the column `prompt` are messages.
    pub chat: Option<bool>,
    /// What the answer of the model begins with, with `{column}` for columns.
    pub prefill: Option<String>,
    /// At most this many rows of each file.
    pub max_rows: Option<usize>,
}

fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a path or a list of paths")]
    enum Paths {
        One(PathBuf),
        More(Vec<PathBuf>),
    }
    Ok(match Option::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Paths::One(path)) => vec![path],
        Some(Paths::More(paths)) => paths,
    })
}

/// The rows of a run.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The rows to train on, in the order of the files.
    pub train: Vec<Row>,
    /// The rows to evaluate on; there may be none.
    pub held_out: Vec<Row>,
    asking: Asking,
    prefill: Option<Template>,
}

impl DatasetConfig {
    /// Errs if the keys contradict each other or a template is not one. Opens no file.
    pub fn validate(&self) -> Result<()> {
        ensure!(
            !self.train.is_empty(),
            "train: absent, must be a file of JSON lines or several"
        );
        ensure!(
            self.held_out.is_empty() || self.held_out_rows.is_none(),
            "held_out_rows: given together with held_out, must be one of them"
        );
        for (name, value) in [
            ("held_out_rows", self.held_out_rows),
            ("max_rows", self.max_rows),
        ] {
            ensure!(value != Some(0), "{name}: 0, must be at least 1");
        }
        self.asking()?;
        self.prefill()?;
        Ok(())
    }

    fn asking(&self) -> Result<Asking> {
        let prompt = self.prompt.as_deref().map(Template::new).transpose();
        Ok(Asking {
            prompt: prompt.context("prompt")?,
            system: self.system.clone(),
            chat: self.chat,
        })
    }

    fn prefill(&self) -> Result<Option<Template>> {
        let prefill = self.prefill.as_deref().map(Template::new).transpose();
        prefill.context("prefill")
    }

    /// Reads the files. `seed` decides which rows are held out.
    ///
    /// Errs with file and line if something cannot be read, or a row has no prompt.
    pub fn load(&self, seed: u64) -> Result<Dataset> {
        self.validate()?;
        let mut train = self.rows(&self.train)?;
        let mut held_out = self.rows(&self.held_out)?;
        if let Some(count) = self.held_out_rows {
            ensure!(
                count < train.len(),
                "held_out_rows: {count} of {} rows, there must be one left to train on",
                train.len()
            );
            (train, held_out) = split(train, count, seed)?;
        }
        let dataset = Dataset {
            train,
            held_out,
            asking: self.asking()?,
            prefill: self.prefill()?,
        };
        for row in dataset.train.iter().chain(&dataset.held_out) {
            dataset.question(row)?;
            dataset.prefill(row)?;
        }
        Ok(dataset)
    }

    fn rows(&self, paths: &[PathBuf]) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for path in paths {
            let of_file = read_rows(path)?.into_iter();
            rows.extend(of_file.take(self.max_rows.unwrap_or(usize::MAX)));
        }
        Ok(rows)
    }
}

/// The rows without `count` of them, and these.
fn split(rows: Vec<Row>, count: usize, seed: u64) -> Result<(Vec<Row>, Vec<Row>)> {
    let mut is_held_out = vec![false; rows.len()];
    for row in ShuffledOrder::new(rows.len(), seed)?.slice(0, count) {
        is_held_out[row] = true;
    }
    let mut is_held_out = is_held_out.into_iter();
    let (held_out, train) = rows
        .into_iter()
        .partition(|_| is_held_out.next().unwrap_or(false));
    Ok((train, held_out))
}

impl Dataset {
    /// What a row asks.
    pub fn question(&self, row: &Row) -> Result<Question> {
        self.asking.question(row)
    }

    /// What the answer to a row begins with; nothing, unless the configuration says so.
    pub fn prefill(&self, row: &Row) -> Result<String> {
        match &self.prefill {
            Some(template) => template.fill(&row.columns).with_context(|| row.place()),
            None => Ok(String::new()),
        }
    }
}
