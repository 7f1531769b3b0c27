//! What a run has left in its folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use candle_grpo_train::read_json_lines;
use serde::Deserialize;
use serde_json::Value;

/// What a run has left in its folder.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The name of the folder.
    pub name: String,
    /// The settings, each by its path (`recipe.overlong`).
    pub settings: BTreeMap<String, String>,
    /// The figures of each step by name; those within others by a path (`seconds.train`).
    pub steps: Vec<BTreeMap<String, f64>>,
    /// How many steps made no update.
    pub skipped: usize,
    /// The figures of each evaluation.
    pub evaluations: Vec<BTreeMap<String, f64>>,
    /// Answers of evaluations, in their order.
    pub samples: Vec<RunSample>,
}

/// An answer of an evaluation: a line of `samples.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RunSample {
    /// After which step.
    pub step: usize,
    /// The prompt.
    pub prompt: String,
    /// The answer.
    pub completion: String,
    /// Its reward.
    pub reward: f64,
}

impl Run {
    /// Reads the folder of a run: `config.json` and `metrics.jsonl`, and `evaluations.jsonl` and `samples.jsonl` if they are
    /// there.
    ///
    /// A last line that is not whole, as that of a run that was killed, is left out. Errs with file and line at any other.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = folder.join("config.json");
        let text = fs::read_to_string(&config).with_context(|| {
            format!(
                "{}: cannot be read, {} is not the folder of a run",
                config.display(),
                folder.display()
            )
        })?;
        let value: Value =
            serde_json::from_str(&text).with_context(|| config.display().to_string())?;
        let mut settings = BTreeMap::new();
        flatten("", &value, &mut |path, value| {
            let text = match value {
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            settings.insert(path.to_owned(), text);
        });
        let name = folder
            .canonicalize()
            .ok()
            .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let steps: Vec<Value> = read_json_lines(&folder.join("metrics.jsonl"))?;
        let skipped = steps.iter().filter(|step| step["skipped"] == true).count();
        Ok(Self {
            name: name.unwrap_or_else(|| folder.display().to_string()),
            settings,
            steps: figures(&steps),
            skipped,
            evaluations: figures(&read_json_lines(&folder.join("evaluations.jsonl"))?),
            samples: read_json_lines(&folder.join("samples.jsonl"))?,
        })
    }

    /// The answers of the first evaluation beside those of the last, to the same prompts, with their steps; none unless there
    /// were two.
    pub fn before_and_after(&self) -> Vec<(&RunSample, &RunSample)> {
        let steps = self.samples.iter().map(|sample| sample.step);
        let (Some(first), Some(last)) = (steps.clone().min(), steps.max()) else {
            return Vec::new();
        };
        if first == last {
            return Vec::new();
        }
        // The same prompt may be answered several times: its first answers are compared, its second ones, and so on.
        let numbered = |step: usize| {
            let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
            self.samples
                .iter()
                .filter(move |sample| sample.step == step)
                .map(move |sample| {
                    let number = seen.entry(&sample.prompt).or_default();
                    *number += 1;
                    ((sample.prompt.as_str(), *number), sample)
                })
        };
        let after: BTreeMap<_, _> = numbered(last).collect();
        numbered(first)
            .filter_map(|(key, before)| Some((before, *after.get(&key)?)))
            .collect()
    }
}

fn figures(lines: &[Value]) -> Vec<BTreeMap<String, f64>> {
    let of_line = |line: &Value| {
        let mut figures = BTreeMap::new();
        flatten("", line, &mut |path, value| {
            if let Some(number) = value.as_f64() {
                figures.insert(path.to_owned(), number);
            }
        });
        figures
    };
    lines.iter().map(of_line).collect()
}

/// Every value that holds no others, with its path.
fn flatten(path: &str, value: &Value, take: &mut impl FnMut(&str, &Value)) {
    let inside = |step: &str| {
        if path.is_empty() {
            step.to_owned()
        } else {
            format!("{path}.{step}")
        }
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                flatten(&inside(key), value, take);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (i, value) in items.iter().enumerate() {
                flatten(&inside(&i.to_string()), value, take);
            }
        }
        value => take(path, value),
    }
}
