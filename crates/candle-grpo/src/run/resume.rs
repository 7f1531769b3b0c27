//! The folder of a run: begun, replaced or resumed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::data::read_json_lines;
use candle_grpo_train::run::{ReplacedRun, RunInputs, RunLock};
use candle_grpo_train::{RunDir, StepMetrics, Trainer};
use serde_json::{Map, Value};

use super::session::Start;
use crate::config::RunConfig;

const CONFIG: &str = "config.json";
const INPUTS: &str = "inputs.json";

/// Settings that may change when a run resumes. The contents of model and data are compared in
/// place of their paths.
const MAY_CHANGE: [&str; 10] = [
    "checkpoint",
    "data.held_out",
    "data.max_rows",
    "data.train",
    "evaluation",
    "max_steps",
    "model",
    "run_dir",
    "sampler.max_batch_size",
    "threads",
];

/// Differences in a message; more are counted.
const SHOWN: usize = 8;

/// Opens the folder of the run. Returns the metrics of its steps, and the run that it replaces. A
/// run that resumes puts `trainer` into the state of its last checkpoint.
pub(super) fn open(
    config: &RunConfig,
    inputs: &RunInputs,
    trainer: &mut Trainer,
    start: Start,
) -> Result<(RunDir, Vec<StepMetrics>, Option<ReplacedRun>)> {
    let path = &config.run_dir;
    let settings = config.to_value()?;
    let accept = start == Start::ResumeChanged;
    let mut replaced = None;
    let (dir, metrics) = match start {
        Start::New => (RunDir::create(path, &settings)?, Vec::new()),
        Start::Replace => {
            let dir;
            (dir, replaced) = RunDir::replace(path, &settings)?;
            if let Some(replaced) = &replaced {
                tracing::info!(
                    "the previous run is kept in {} until this one has a checkpoint",
                    replaced.path().display()
                );
            }
            (dir, Vec::new())
        }
        Start::Resume | Start::ResumeChanged => match RunDir::is_run(path) {
            true => resume(path, &settings, inputs, trainer, accept)?,
            false => (RunDir::create(path, &settings)?, Vec::new()),
        },
    };
    dir.write(INPUTS, serde_json::to_vec_pretty(inputs)?)?;
    Ok((dir, metrics, replaced))
}

fn resume(
    path: &Path,
    settings: &Value,
    inputs: &RunInputs,
    trainer: &mut Trainer,
    accept: bool,
) -> Result<(RunDir, Vec<StepMetrics>)> {
    // Before the checkpoints are read, which another program may be writing.
    let lock = RunLock::take(path)?;
    compare_settings(path, settings, accept)?;
    compare_inputs(path, inputs, trainer, accept)?;
    let found = RunDir::checkpoints(path).latest()?;
    for (checkpoint, reason) in &found.damaged {
        tracing::warn!("{}: {reason}; it is passed over", checkpoint.path.display());
    }
    if let Some(checkpoint) = &found.checkpoint {
        trainer.load_state(&checkpoint.path)?;
        tracing::info!("resuming from {}", checkpoint.path.display());
    } else if let Some((checkpoint, reason)) = found.damaged.first() {
        bail!(
            "{}: {reason}, and no other checkpoint of the run is whole",
            checkpoint.path.display()
        );
    } else {
        let metrics = read_json_lines::<StepMetrics>(&path.join("metrics.jsonl"))?;
        let steps = metrics.last().map_or(0, |metrics| metrics.step);
        let every = settings["checkpoint"]["every_steps"].as_u64();
        ensure!(
            every.is_none_or(|every| steps as u64 <= every),
            "{}: has metrics of {steps} steps and no checkpoint; put its folder checkpoints back, or start again with --replace",
            path.display()
        );
        tracing::info!(
            "{}: has no checkpoint yet, starting from the beginning",
            path.display()
        );
    }
    RunDir::resume(lock, settings, trainer.steps())
}

/// Refuses the settings of another run, and warns of changes that are usual.
fn compare_settings(path: &Path, now: &Value, accept: bool) -> Result<()> {
    let config = path.join(CONFIG);
    let before = fs::read(&config).with_context(|| config.display().to_string())?;
    let before = serde_json::from_slice(&before).with_context(|| config.display().to_string())?;
    if before == Value::Object(Map::new()) {
        tracing::warn!("the settings that the run began with are lost");
        return Ok(());
    }
    let mut differences = Vec::new();
    compare("", &before, now, &mut differences);
    let (usual, other): (Vec<_>, Vec<_>) = differences
        .into_iter()
        .partition(|difference| may_change(&difference.key));
    let warned = if accept {
        [usual, other].concat()
    } else {
        ensure!(
            other.is_empty(),
            "run directory {}: began with other settings: {}; give a run_dir of its own, or accept the new settings with --accept-changes",
            path.display(),
            list(&other)
        );
        usual
    };
    for difference in &warned {
        tracing::warn!("the run began with another {}", difference.text);
    }
    Ok(())
}

fn list(differences: &[Difference]) -> String {
    let shown = differences.iter().take(SHOWN);
    let shown: Vec<&str> = shown.map(|difference| difference.text.as_str()).collect();
    match differences.len().saturating_sub(SHOWN) {
        0 => shown.join("; "),
        more => format!("{}; and {more} more", shown.join("; ")),
    }
}

fn may_change(key: &str) -> bool {
    MAY_CHANGE.iter().any(|prefix| {
        key.strip_prefix(prefix)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// A setting with its values before and now.
#[derive(Clone)]
struct Difference {
    key: String,
    text: String,
}

fn compare(path: &str, before: &Value, now: &Value, found: &mut Vec<Difference>) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
            let value =
                |map: &Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
            for key in keys {
                let path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                compare(&path, &value(before, key), &value(now, key), found);
            }
        }
        (before, now) if before != now => found.push(Difference {
            key: path.to_owned(),
            text: format!("{path}: {before}, now {now}"),
        }),
        _ => {}
    }
}

/// Refuses another model and other held-out rows, and warns of other training rows and reward
/// files.
fn compare_inputs(path: &Path, now: &RunInputs, trainer: &Trainer, accept: bool) -> Result<()> {
    let file = path.join(INPUTS);
    if !file.exists() {
        // A run that was killed as it began has no checkpoint.
        if !RunDir::checkpoints(path).all()?.is_empty() {
            tracing::warn!(
                "{}: is missing, so changes of model, data and reward files are not noticed",
                file.display()
            );
        }
        return Ok(());
    }
    let before = fs::read(&file).with_context(|| file.display().to_string())?;
    let before: RunInputs =
        serde_json::from_slice(&before).with_context(|| file.display().to_string())?;
    let changes = before.changes(now, trainer.prompts());
    ensure!(
        accept || changes.breaking.is_empty(),
        "run directory {}: {}; accept it with --accept-changes",
        path.display(),
        changes.breaking.join("; ")
    );
    for change in changes.breaking.iter().chain(&changes.notable) {
        tracing::warn!("{change}");
    }
    Ok(())
}
