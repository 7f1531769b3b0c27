//! A run's files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use candle_grpo_nn::json;
use candle_grpo_train::RunDir;
use candle_grpo_train::data::read_json_lines;
use candle_grpo_train::learn::PhaseSeconds;
use candle_grpo_train::run::RolloutRecord;
use serde::Deserialize;
use serde_json::Value;

/// A run's settings, metrics and answers.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The run directory's name.
    pub name: String,
    /// The settings, each by its path (`recipe.overlong`).
    pub settings: BTreeMap<String, String>,
    /// Each step's metrics by name; nested ones by path (`seconds.train`).
    pub steps: Vec<BTreeMap<String, f64>>,
    /// The number of steps without an update.
    pub skipped: usize,
    /// Each evaluation's metrics.
    pub evaluations: Vec<BTreeMap<String, f64>>,
    /// Evaluation answers, in order.
    pub samples: Vec<RunSample>,
    /// Training completions, in order.
    pub rollouts: Vec<RolloutRecord>,
}

/// An evaluation answer: a line in `samples.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RunSample {
    /// The evaluation's step.
    pub step: usize,
    /// The prompt.
    pub prompt: String,
    /// The answer.
    pub completion: String,
    /// Its reward; `None` if it is missing.
    pub reward: Option<f64>,
}

impl Run {
    /// Reads a run directory: `config.json`, `metrics.jsonl`, and if they exist
    /// `evaluations.jsonl`, `samples.jsonl` and `rollouts.jsonl`. An incomplete last line is left
    /// out.
    ///
    /// # Errors
    ///
    /// Returns an error with file and line if a file cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = folder.join("config.json");
        if let Some(lost) = RunDir::lost_files(folder)? {
            bail!("{}: {lost}", folder.display());
        }
        let text = fs::read_to_string(&config).with_context(|| {
            format!(
                "{}: cannot be read; {} is not a run directory",
                config.display(),
                folder.display()
            )
        })?;
        let value: Value = serde_json::from_str(&text).map_err(|error| {
            anyhow!("{}: {}", config.display(), json::message_with_place(&error))
        })?;
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
        let steps = read_steps(&folder.join("metrics.jsonl"))?;
        let skipped = steps.iter().filter(|step| step["skipped"] == true).count();
        Ok(Self {
            name: name.unwrap_or_else(|| folder.display().to_string()),
            settings,
            steps: metrics(&steps),
            skipped,
            evaluations: metrics(&read_steps(&folder.join("evaluations.jsonl"))?),
            samples: read_json_lines(&folder.join("samples.jsonl"))?,
            rollouts: read_json_lines(&folder.join("rollouts.jsonl"))?,
        })
    }

    /// Returns whether this is a supervised run: its settings have the section `sft`.
    pub fn is_supervised(&self) -> bool {
        self.settings.keys().any(|key| key.starts_with("sft."))
    }

    /// Returns the duration of each step that has times, in seconds (see [`PhaseSeconds::total`]).
    pub fn step_seconds(&self) -> Vec<f64> {
        let duration = |step: &BTreeMap<String, f64>| {
            let phase = |name: &str| step.get(&format!("seconds.{name}")).copied();
            let mut seconds = PhaseSeconds::default();
            // A supervised run samples and scores nothing.
            seconds.sample = phase("sample").unwrap_or_default();
            seconds.score = phase("score").unwrap_or_default();
            seconds.train = phase("train")?;
            seconds.wait = phase("wait");
            Some(seconds.total())
        };
        self.steps.iter().filter_map(duration).collect()
    }

    /// Returns pairs of answers to the same prompt, from the first and the last evaluation; none
    /// unless there are two evaluations.
    pub fn before_and_after(&self) -> Vec<(&RunSample, &RunSample)> {
        let steps = self.samples.iter().map(|sample| sample.step);
        let (Some(first), Some(last)) = (steps.clone().min(), steps.max()) else {
            return Vec::new();
        };
        if first == last {
            return Vec::new();
        }
        // A prompt may have several answers. The first ones form a pair, the second ones, and so
        // on.
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

/// Reads a metrics file, whose lines name their steps.
fn read_steps(file: &Path) -> Result<Vec<Value>> {
    let lines: Vec<Value> = read_json_lines(file)?;
    match lines.iter().position(|line| !line["step"].is_u64()) {
        Some(line) => bail!(
            "{}:{}: has no number at \"step\", must have a step's metrics",
            file.display(),
            line + 1
        ),
        None => Ok(lines),
    }
}

fn metrics(lines: &[Value]) -> Vec<BTreeMap<String, f64>> {
    let of_line = |line: &Value| {
        let mut metrics = BTreeMap::new();
        flatten("", line, &mut |path, value| {
            if let Some(number) = value.as_f64() {
                metrics.insert(path.to_owned(), number);
            }
        });
        metrics
    };
    lines.iter().map(of_line).collect()
}

/// Calls `take` with every leaf and its path.
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
