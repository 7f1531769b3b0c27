//! A run directory when it is created, replaced or resumed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::data::read_json;
use candle_grpo_train::learn::Ranks;
use candle_grpo_train::run::{ReplacedRun, RowDigest, RunInputs, StepRecord, StoppedRun};
use candle_grpo_train::sft::{SftMetrics, SftTrainer};
use candle_grpo_train::{ComputeDType, Pretrained, RunDir, StepMetrics, Trainer};
use serde_json::{Map, Value};

use super::folder::Start;
use crate::config::{RunConfig, SftRunConfig};

pub(super) const CONFIG: &str = "config.json";
const INPUTS: &str = "inputs.json";

/// Keys of a section with rows that may change as long as the rows are the same.
const ROWS: [&str; 3] = ["held_out", "max_rows", "train"];

/// The number of differences that a message lists; it counts the others.
const SHOWN: usize = 8;

/// A trainer whose runs have a directory.
pub trait RunTrainer {
    /// A step's metrics.
    type Record: StepRecord + Clone;
    /// Settings that may change when a run resumes.
    const MAY_CHANGE: &'static [&'static str];

    /// Reads the settings that a run wrote to `file`, and fills in defaults for missing keys.
    /// `None` if this version cannot read them.
    fn settings(file: &Path) -> Option<Value>;

    fn steps(&self) -> usize;
    fn ranks(&self) -> &Ranks;
    fn load_state(&mut self, folder: &Path) -> Result<()>;
    fn ensure_finite(&self) -> Result<()>;
    fn ensure_equal_ranks(&self) -> Result<()>;
    fn take_part_in_checkpoint(&self) -> Result<()>;
    fn write_checkpoint(
        &self,
        folder: &Path,
        model: &Pretrained,
        dtype: ComputeDType,
    ) -> Result<()>;
}

/// Implements [`RunTrainer`] by the methods with the same names.
macro_rules! run_trainer {
    ($trainer:ty, $record:ty, $config:ty, $may_change:expr) => {
        impl RunTrainer for $trainer {
            type Record = $record;
            const MAY_CHANGE: &'static [&'static str] = &$may_change;

            fn settings(file: &Path) -> Option<Value> {
                <$config>::read(file).ok()?.to_value().ok()
            }

            fn steps(&self) -> usize {
                Self::steps(self)
            }

            fn ranks(&self) -> &Ranks {
                Self::ranks(self)
            }

            fn load_state(&mut self, folder: &Path) -> Result<()> {
                Self::load_state(self, folder)
            }

            fn ensure_finite(&self) -> Result<()> {
                Self::ensure_finite(self)
            }

            fn ensure_equal_ranks(&self) -> Result<()> {
                Self::ensure_equal_ranks(self)
            }

            fn take_part_in_checkpoint(&self) -> Result<()> {
                Self::take_part_in_checkpoint(self)
            }

            fn write_checkpoint(
                &self,
                folder: &Path,
                model: &Pretrained,
                dtype: ComputeDType,
            ) -> Result<()> {
                Self::write_checkpoint(self, folder, model, dtype)
            }
        }
    };
}

// The contents of the model are compared in place of its path.
run_trainer!(
    Trainer,
    StepMetrics,
    RunConfig,
    [
        "activation_checkpointing",
        "activation_offloading",
        "alarms",
        "checkpoint",
        "critic.optimizer.memory",
        "max_memory_mib",
        "max_steps",
        "model",
        "optimizer.memory",
        "rollout",
        "rollout_log",
        "run_dir",
        "sampling.max_batch_size",
        "sampling.max_cache_mib",
        "sequence_ranks",
        "sharding",
        "teacher.server.api_key_env",
        "teacher.server.base_url",
        "teacher.server.max_inflight",
        "teacher.server.max_retries",
        "teacher.server.request_timeout",
        "teacher.server.server_timeout",
        "threads",
        "trackers",
    ]
);

// The number of steps decides the learning rate of each, so it may not change.
run_trainer!(
    SftTrainer,
    SftMetrics,
    SftRunConfig,
    [
        "checkpoint",
        "model",
        "run_dir",
        "sft.activation_checkpointing",
        "sft.activation_offloading",
        "sft.optimizer.memory",
        "sft.sharding",
        "threads",
        "trackers",
    ]
);

/// A run's settings and inputs.
pub(super) struct Identity {
    pub(super) settings: Value,
    pub(super) inputs: RunInputs,
    /// The digests of the training rows.
    pub(super) train: Vec<RowDigest>,
}

/// A run directory when the run starts.
pub(super) struct Opened<M> {
    pub(super) dir: RunDir,
    /// The metrics for earlier steps.
    pub(super) metrics: Vec<M>,
    /// The replaced run.
    pub(super) replaced: Option<ReplacedRun>,
    /// The checkpoint to resume from.
    pub(super) checkpoint: Option<PathBuf>,
}

/// Opens the run directory. On resume, loads the last checkpoint into `trainer`.
pub(super) fn open<T: RunTrainer>(
    path: &Path,
    identity: &Identity,
    trainer: &mut T,
    start: Start,
) -> Result<Opened<T::Record>> {
    let settings = &identity.settings;
    let accept = start == Start::ResumeChanged;
    let begun = |dir, replaced| Opened {
        dir,
        metrics: Vec::new(),
        replaced,
        checkpoint: None,
    };
    let opened = match start {
        Start::New => begun(RunDir::create(path, settings)?, None),
        Start::Replace => {
            let (dir, replaced) = RunDir::replace(path, settings)?;
            if let Some(replaced) = &replaced {
                tracing::info!(
                    "the previous run is kept in {} until this one has a checkpoint",
                    replaced.path().display()
                );
            }
            begun(dir, replaced)
        }
        Start::Resume | Start::ResumeChanged => {
            if RunDir::is_run(path) {
                resume(path, identity, trainer, accept)?
            } else {
                begun(RunDir::create(path, settings)?, None)
            }
        }
    };
    let written = serde_json::to_vec_pretty(&identity.inputs)?;
    opened.dir.write(INPUTS, written)?;
    Ok(opened)
}

fn resume<T: RunTrainer>(
    path: &Path,
    identity: &Identity,
    trainer: &mut T,
    accept: bool,
) -> Result<Opened<T::Record>> {
    // `Changes` reports settings that cannot be read.
    let before = read_json::<Value>(&path.join(CONFIG)).unwrap_or_default();
    ensure_same_kind(path, &before, &identity.settings)?;
    // Before the checkpoints are read, which another program may be writing.
    let run = StoppedRun::<T::Record>::open(path)?;
    let settings = &identity.settings;
    let changes = Changes::new::<T>(path, identity)?;
    let refused = format!(
        "run directory {}: {}",
        path.display(),
        changes.refused.join("; ")
    );
    let found = RunDir::checkpoints(path).latest()?;
    for (checkpoint, reason) in &found.damaged {
        tracing::warn!("{}: {reason}; it is skipped", checkpoint.path.display());
    }
    if let Some(checkpoint) = &found.checkpoint {
        trainer.load_state(&checkpoint.path).map_err(|error| if changes.refused.is_empty() {
error
} else {
error.context(format!(
                "{refused}; the checkpoint does not fit, so this cannot be accepted: undo the change, or use another run_dir"
            ))
})?;
        tracing::info!("resuming from {}", checkpoint.path.display());
    } else if let Some((checkpoint, reason)) = found.damaged.first() {
        bail!(
            "{}: {reason}, and the run has no other intact checkpoint",
            checkpoint.path.display()
        );
    } else {
        let steps = run.steps();
        // Of the settings with which it ran, unless they are lost.
        let checkpoint = before.get("checkpoint").unwrap_or(&settings["checkpoint"]);
        let every = checkpoint["every_steps"].as_u64();
        ensure!(
            every.is_none_or(|every| steps as u64 <= every),
            "{}: has metrics for {steps} steps and no checkpoint; restore its directory checkpoints, or start over with --replace",
            path.display()
        );
        tracing::info!(
            "{}: has no checkpoint yet, starting from step 0",
            path.display()
        );
    }
    // The offer comes after the checkpoint is loaded: some changes cannot be accepted.
    ensure!(
        accept || changes.refused.is_empty(),
        "{refused}; use another run_dir, or accept this with --accept-changes"
    );
    for change in changes.refused.iter().chain(&changes.noted) {
        tracing::warn!("{change}");
    }
    let resumed = run.resume(settings, trainer.steps())?;
    warn_of_set_aside(&resumed.set_aside);
    Ok(Opened {
        dir: resumed.dir,
        metrics: resumed.metrics,
        replaced: None,
        checkpoint: found.checkpoint.map(|checkpoint| checkpoint.path),
    })
}

/// Rejects resuming a `grpo sft` run with `grpo train`, or vice versa.
fn ensure_same_kind(path: &Path, before: &Value, now: &Value) -> Result<()> {
    // Lost ones do not tell.
    if before.as_object().is_none_or(Map::is_empty) {
        return Ok(());
    }
    let command = |settings: &Value| match settings.get("sft") {
        Some(_) => "grpo sft",
        None => "grpo train",
    };
    let (now, before) = (command(now), command(before));
    ensure!(
        now == before,
        "run directory {}: has a {before} run, must have a {now} run",
        path.display()
    );
    Ok(())
}

/// Returns the inputs that the run in `run_dir` started with, such as hub commits and the time in
/// its chat template; `None` if there is no run.
///
/// # Errors
///
/// Returns an error if the file with the inputs is damaged.
pub fn recorded_inputs(run_dir: &Path) -> Result<Option<RunInputs>> {
    read_inputs(&run_dir.join(INPUTS))
}

/// Reads a run's digests; `None` if it has none.
fn read_inputs(path: &Path) -> Result<Option<RunInputs>> {
    if !path.exists() {
        return Ok(None);
    }
    let inputs = read_json(path).context(
        "the digests of model and data are lost; remove the file to resume without them",
    )?;
    Ok(Some(inputs))
}

/// Warns about checkpoints that are not removed.
pub(super) fn warn_of_set_aside(checkpoints: &[std::path::PathBuf]) {
    for path in checkpoints {
        tracing::warn!(
            "{}: a checkpoint with unknown files, renamed instead of removed",
            path.display()
        );
    }
}

/// The differences between a run's start and now.
#[derive(Default)]
struct Changes {
    /// A different model, different held-out rows, and another configuration's settings.
    refused: Vec<String>,
    /// Common changes, and different content in the same files.
    noted: Vec<String>,
}

impl Changes {
    fn new<T: RunTrainer>(path: &Path, identity: &Identity) -> Result<Self> {
        let now = &identity.inputs;
        let mut changes = Self::default();
        let inputs = path.join(INPUTS);
        let before = read_inputs(&inputs)?;
        // A run that was killed as it began has no checkpoint.
        if before.is_none() && !RunDir::checkpoints(path).all()?.is_empty() {
            changes.noted.push(format!(
                "{}: is missing, so changes to model, data and reward files go unnoticed",
                inputs.display()
            ));
        }
        let may_change = T::MAY_CHANGE.iter().map(|&key| key.to_owned());
        let mut may_change: Vec<String> = may_change.collect();
        let teachers = identity.settings["teacher"]["models"].as_object();
        for name in teachers.into_iter().flat_map(Map::keys) {
            let of_server = T::MAY_CHANGE.iter();
            let of_server = of_server.filter_map(|key| key.strip_prefix("teacher.server."));
            may_change.extend(of_server.map(|key| format!("teacher.models.{name}.server.{key}")));
        }
        if let Some(before) = &before {
            for section in before.sections_with_rows_of(now) {
                may_change.extend(ROWS.map(|key| format!("{section}.{key}")));
            }
        }
        changes.compare_settings::<T>(&path.join(CONFIG), &identity.settings, &may_change)?;
        if let Some(before) = before {
            let inputs = before.changes(now, &identity.train);
            changes.refused.extend(inputs.breaking);
            changes.noted.extend(inputs.notable);
        }
        Ok(changes)
    }

    fn compare_settings<T: RunTrainer>(
        &mut self,
        config: &Path,
        now: &Value,
        may_change: &[String],
    ) -> Result<()> {
        let before: Value = read_json(config)
            .context("the run's settings are lost; restore the file, or one with {}")?;
        if before == Value::Object(Map::new()) {
            self.noted
                .push("the run's first settings are lost".to_owned());
            return Ok(());
        }
        // A key that this version has and an earlier one had not is no change.
        let before = T::settings(config).unwrap_or(before);
        let mut differences = Vec::new();
        compare("", &before, now, &mut differences);
        let is_usual = |difference: &Difference| may_change.iter().any(|key| difference.is_in(key));
        let (usual, other): (Vec<_>, Vec<_>) = differences.into_iter().partition(is_usual);
        if !other.is_empty() {
            self.refused
                .push(format!("started with different settings: {}", list(&other)));
        }
        let usual = usual.into_iter();
        self.noted.extend(
            usual.map(|difference| format!("the run started with another {}", difference.text)),
        );
        Ok(())
    }
}

fn list(differences: &[Difference]) -> String {
    let shown = differences.iter().take(SHOWN);
    let shown: Vec<&str> = shown.map(|difference| difference.text.as_str()).collect();
    match differences.len().saturating_sub(SHOWN) {
        0 => shown.join("; "),
        more => format!("{}; and {more} more", shown.join("; ")),
    }
}

/// A setting with its values before and now.
struct Difference {
    key: String,
    text: String,
}

impl Difference {
    /// Returns whether the setting is `key` or below it.
    fn is_in(&self, key: &str) -> bool {
        let rest = self.key.strip_prefix(key);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
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
