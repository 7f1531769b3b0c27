//! Scores from a program in any language.

mod answer;
mod files;
mod group;
mod imports;
mod process;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};

use self::process::{Failure, Process};
use crate::progress::NoProgress;
use crate::{Interrupted, Progress, RewardFunction, Sample};

/// The options of [`ProgramReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramConfig {
    /// The program and its arguments. No shell is in between.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The longest time for the scores of one batch.
    #[serde(default = "time_limit")]
    pub time_limit_seconds: f64,
    /// The number of restarts for one batch, when the program ends or exceeds the time.
    #[serde(default = "restarts")]
    pub restarts: usize,
}

fn time_limit() -> f64 {
    60.
}

fn restarts() -> usize {
    1
}

impl ProgramConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// If the command is empty or the time limit is not from 0 (exclusive) to 1e9 seconds.
    pub fn validate(&self) -> Result<()> {
        check(
            self.command.first().is_some_and(|name| !name.is_empty()),
            "command",
            format_args!("{:?}", self.command),
            "begin with the name of a program",
        )?;
        let seconds = self.time_limit_seconds;
        Ok(check(
            seconds > 0. && seconds <= 1e9,
            "time_limit_seconds",
            seconds,
            "be above 0 and at most 1e9",
        )?)
    }
}

/// A program that reads one line of JSON for each completion and writes one line with its score.
///
/// A request is an object with `id`, `prompt`, `completion`, `finish_reason`, `completion_tokens`
/// (their number) and `columns`. An answer is a number, or an object with the number at `score`.
/// Answers come in the order of the requests, or echo the `id` of the request, in any order.
///
/// The program must answer each line when it comes, flush each answer, write nothing else to
/// stdout, and end when its input does. It ends with this process too, even if that is killed.
///
/// A program that echoes ids is started once and keeps running between batches. Without ids an
/// additional line would shift the scores after it, and its time of arrival does not show that. So
/// a program without ids gets one batch: its input ends, and it must write exactly one line for
/// each request until its output ends. For the next batch it is started again, in advance.
///
/// ```no_run
/// use candle_grpo_train::rewards::{ProgramConfig, ProgramReward};
///
/// let config: ProgramConfig = serde_json::from_str(r#"{"command": ["python3", "reward.py"]}"#)?;
/// let reward = ProgramReward::new(config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ProgramReward {
    config: ProgramConfig,
    progress: Arc<dyn Progress>,
    process: Mutex<Option<Process>>,
}

impl ProgramReward {
    /// Starts the program.
    ///
    /// # Errors
    ///
    /// If `config` is not valid or the program cannot be started.
    pub fn new(config: ProgramConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            process: Mutex::new(Some(Process::start(&config)?)),
            progress: Arc::new(NoProgress),
            config,
        })
    }

    /// The scores of a batch, after as many restarts as the configuration allows.
    fn exchange(&self, slot: &mut Option<Process>, samples: &[Sample]) -> Result<Vec<f32>> {
        let limit = Duration::from_secs_f64(self.config.time_limit_seconds);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut process = match slot.take() {
                Some(process) => process,
                None => Process::start(&self.config)?,
            };
            let error = match process.score(samples, limit, self.progress.as_ref()) {
                Ok(scores) => {
                    *slot = if process.keeps_running() {
                        Some(process)
                    } else {
                        drop(process);
                        // It starts while the policy trains. An error appears in the next batch.
                        Process::start(&self.config).ok()
                    };
                    return Ok(scores);
                }
                Err(Failure::Interrupted) => return Err(Interrupted.into()),
                Err(Failure::Ended(_)) if self.progress.is_canceled() => {
                    return Err(Interrupted.into());
                }
                Err(Failure::Ended(_)) if attempts <= self.config.restarts => continue,
                Err(Failure::Ended(error) | Failure::Wrong(error)) => process.stop(error),
            };
            return match attempts {
                1 => Err(error),
                _ => Err(error.context(format!("tried {attempts} times"))),
            };
        }
    }
}

impl RewardFunction for ProgramReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        // After a panic there is a program or none, and either will do.
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        self.exchange(&mut slot, samples)
            .with_context(|| format!("program {:?}", self.config.command))
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }

    fn finish(&self) -> Result<()> {
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.take() {
            Some(process) => process
                .finish()
                .with_context(|| format!("program {:?}", self.config.command)),
            None => Ok(()),
        }
    }
}
