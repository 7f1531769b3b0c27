//! A suite's prompts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::data::{self, Row};
use candle_grpo_train::{Dataset, Pretrained, Prompt};
use serde_json::Value;

use super::choices::add;
use crate::config::SuiteConfig;
use crate::run::all_prompts;

/// A suite's prompts with their ids.
pub struct SuitePrompts {
    /// The prompts, in row order.
    pub prompts: Vec<Prompt>,
    /// Each prompt's id, by which two results are paired.
    pub ids: Vec<String>,
}

/// Reads a suite's rows: from `folder` if it is set, otherwise from the hub file, whose name
/// `locate` turns into a path. A suite that names no hub file is read from its own files. Adds the
/// columns of [`SuiteConfig::choices`], and checks that each row has the columns that the rewards
/// need.
///
/// # Errors
///
/// Returns an error with the names of suite and file if a file is missing or cannot be read, and
/// with file and line if a row lacks a column.
pub fn read_rows(
    suite: &SuiteConfig,
    folder: Option<&Path>,
    locate: impl Fn(&Path) -> Result<PathBuf>,
) -> Result<Vec<Row>> {
    let files: Vec<PathBuf> = match (folder, &suite.hub) {
        (Some(folder), _) => {
            let files = suite.data.held_out.iter();
            files.map(|file| folder.join(file)).collect()
        }
        (None, Some(hub)) => vec![hub.clone()],
        (None, None) => suite.data.held_out.clone(),
    };
    let mut rows = Vec::new();
    for file in &files {
        let path = locate(file)?;
        ensure!(
            path.is_file(),
            "suite {}: {} is not a file; pass its data directory with --data",
            suite.name,
            path.display()
        );
        let limit = suite.data.max_rows.unwrap_or(usize::MAX);
        rows.extend(data::read_first_rows(&path, limit)?);
    }
    if let Some(choices) = &suite.choices {
        rows.iter_mut().try_for_each(|row| add(choices, row))?;
    }
    for row in &rows {
        for reward in &suite.rewards {
            reward
                .check_row(&row.columns)
                .with_context(|| row.place())?;
        }
    }
    Ok(rows)
}

impl SuitePrompts {
    /// Makes the prompts for the first `evaluation.max_prompts` rows. A model without a chat
    /// template continues them as texts, unless the suite sets `data.chat`.
    ///
    /// # Errors
    ///
    /// Returns an error with file and line if a row has no question, no id or another row's id, or
    /// the chat template rejects it.
    pub fn new(suite: &SuiteConfig, rows: &[Row], pretrained: &Pretrained) -> Result<Self> {
        let rows = suite.evaluation.select(rows);
        let template = suite.chat_template(pretrained)?;
        let mut config = suite.data.clone();
        if template.is_none() && config.system.is_none() {
            config.chat = config.chat.or(Some(false));
        }
        let dataset = Dataset::without_rows(&config)?;
        let tokenizer = &pretrained.tokenizer;
        let prompts = all_prompts(&dataset, rows, template.as_ref(), None, tokenizer)?;
        let dataset = Dataset::without_rows(&suite.data)?;
        let ids = rows.iter().map(|row| id(suite, &dataset, row));
        let mut ids = ids.collect::<Result<Vec<String>>>()?;
        match &suite.id {
            Some(column) => {
                let mut seen = HashMap::new();
                for (row, id) in rows.iter().zip(&ids) {
                    if let Some(first) = seen.insert(id, row) {
                        bail!(
                            "{}: column {column:?}: {id:?}, which is also the id of {}",
                            row.place(),
                            first.place()
                        );
                    }
                }
            }
            None => {
                let repeated = number_repeated(&mut ids);
                if repeated > 0 {
                    tracing::warn!(
                        "suite {}: {repeated} of {} rows repeat an earlier question, and each counts",
                        suite.name,
                        ids.len()
                    );
                }
            }
        }
        Ok(Self { prompts, ids })
    }
}

/// Returns a row's id: its column, or a digest of its question.
fn id(suite: &SuiteConfig, dataset: &Dataset, row: &Row) -> Result<String> {
    let Some(column) = &suite.id else {
        return dataset.question_id(row);
    };
    match row.columns.get(column) {
        Some(Value::String(id)) if !id.is_empty() => Ok(id.clone()),
        Some(Value::Number(id)) => Ok(id.to_string()),
        found => bail!(
            "{}: column {column:?}: {}, must be a number or a text that is not empty",
            row.place(),
            found.map_or("absent".to_owned(), Value::to_string)
        ),
    }
}

/// Adds a number to each question digest that occurred before. Returns how many there are.
fn number_repeated(ids: &mut [String]) -> usize {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut repeated = 0;
    for id in ids {
        let count = seen.entry(id.clone()).or_default();
        *count += 1;
        if *count > 1 {
            *id = format!("{id}-{count}");
            repeated += 1;
        }
    }
    repeated
}
