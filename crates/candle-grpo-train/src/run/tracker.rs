//! Programs that follow a run's metrics.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::StepRecord;
use crate::Progress;
use candle_grpo_rewards::program::{Program, Sink};

/// A program that receives a run's metrics as lines of JSON, for example for an experiment tracker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TrackerConfig {
    /// The program and its arguments. No shell is involved.
    pub command: Vec<String>,
    /// Its working directory. Absent: this program's.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Time in seconds to end after its input ends. Then it is killed.
    #[serde(default = "end_limit_seconds")]
    pub end_limit_seconds: f64,
}

fn end_limit_seconds() -> f64 {
    30.
}

impl TrackerConfig {
    /// Creates a configuration for a command, with the default limit.
    pub fn new(command: Vec<String>) -> Self {
        Self {
            command,
            folder: None,
            end_limit_seconds: end_limit_seconds(),
        }
    }

    /// Checks the options. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn validate(&self) -> Result<()> {
        let limit = self.end_limit_seconds;
        let must = "be from 0 to 3600";
        check(
            (0. ..=3600.).contains(&limit),
            "end_limit_seconds",
            limit,
            must,
        )?;
        self.program().validate()
    }

    /// Checks that the program and its script exist.
    ///
    /// # Errors
    ///
    /// Fails if one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.program().check_files()
    }

    fn program(&self) -> Program {
        let limit = self.end_limit_seconds;
        Program::new(&self.command, self.folder.as_ref(), limit, 0.)
    }
}

/// A running [`TrackerConfig`]. It never ends a run, and can only delay its end. Lines wait in a
/// queue for up to 1,024; further ones are dropped. If the program ends early, that is a warning.
///
/// A line is an object with `event`:
///
/// | `event` | other keys |
/// | --- | --- |
/// | `begin` | `run_dir`, `step` (0, or the step that the run resumes from), `settings` |
/// | `step` | `step`, `metrics`: numbers by their TensorBoard names |
/// | `evaluation` | `step`, `metrics` with names that begin with `evaluation/` |
/// | `end` | `status`: `finished`, or `stopped` after an error or a request to stop |
///
/// It ends when it is dropped.
pub struct Tracker {
    /// The program, until the run ends.
    sink: Option<Sink>,
}

impl Tracker {
    /// Starts the program for a run in the folder `run_dir`, which has these settings and has done
    /// `step` steps.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid or the program cannot be started.
    pub fn start(
        config: &TrackerConfig,
        run_dir: &Path,
        settings: &Value,
        step: usize,
    ) -> Result<Self> {
        config.validate()?;
        let sink = config.program().start_sink();
        let mut tracker = Self {
            sink: Some(sink.context("tracker")?),
        };
        tracker.send(&json!({
            "event": "begin",
            "run_dir": run_dir.to_string_lossy(),
            "step": step,
            "settings": settings,
        }));
        Ok(tracker)
    }

    /// Sends a step's metrics.
    ///
    /// # Errors
    ///
    /// Fails if they cannot be written as JSON.
    pub fn step(&mut self, metrics: &impl StepRecord) -> Result<()> {
        let scalars: BTreeMap<String, f64> = metrics.scalars()?.into_iter().collect();
        self.send(&json!({"event": "step", "step": metrics.step(), "metrics": scalars}));
        Ok(())
    }

    /// Sends an evaluation's metrics after `step` steps.
    pub fn evaluation(&mut self, step: usize, metrics: &BTreeMap<String, f64>) {
        let metrics = metrics.iter();
        let metrics: BTreeMap<String, f64> = metrics
            .map(|(name, value)| (format!("evaluation/{name}"), *value))
            .collect();
        self.send(&json!({"event": "evaluation", "step": step, "metrics": metrics}));
    }

    /// Reports that the run has done all steps, and waits until the program ends, its limit is
    /// over, or `progress` is canceled.
    pub fn finish(mut self, progress: &dyn Progress) {
        self.send(&json!({"event": "end", "status": "finished"}));
        if let Some(sink) = self.sink.take() {
            sink.end(&|| progress.is_canceled());
        }
    }

    fn send(&mut self, line: &Value) {
        if let Some(sink) = &mut self.sink {
            sink.send(line.to_string().into_bytes());
        }
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.send(&json!({"event": "end", "status": "stopped"}));
    }
}
