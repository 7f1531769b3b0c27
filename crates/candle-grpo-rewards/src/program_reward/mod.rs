//! Scores from a program in any language.

mod answer;
mod worker;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use candle_core::Device;
use candle_grpo_core::validate::{at_least_one, finite};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::worker::{Shared, Worker};
use super::options::{RewardInputs, RewardOptions};
use super::weighted::in_parallel;
use super::{OnFailure, Score};
use crate::program::{Program, check_limits};
use crate::{Progress, RewardFunction, Sample};
use candle_grpo_base::progress::NoProgress;

/// The options of [`ProgramReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramConfig {
    /// The program and its arguments. No shell is in between.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The number of its processes, which share each batch.
    #[serde(default = "workers")]
    pub workers: usize,
    /// The longest time for the score of one completion.
    #[serde(default = "time_limit")]
    pub time_limit_seconds: f64,
    /// The longest time for its start, which the first score may take in addition.
    #[serde(default = "start_limit")]
    pub start_limit_seconds: f64,
    /// The treatment of a completion with which the program exceeds the time or ends: `score` or
    /// `exclude`.
    #[serde(default)]
    pub on_timeout: OnFailure,
    /// The score of such a completion, if `on_timeout` is `score`.
    #[serde(default)]
    pub timeout_score: f32,
    /// The number of completions in a row that may fail in a process. One more ends the run.
    #[serde(default = "max_failures")]
    pub max_failures: usize,
}

fn workers() -> usize {
    1
}

fn time_limit() -> f64 {
    60.
}

fn start_limit() -> f64 {
    60.
}

fn max_failures() -> usize {
    32
}

impl ProgramConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// If the command is empty, there are no workers, `time_limit_seconds` is not from 0
    /// (exclusive) to 1e9, `start_limit_seconds` not from 0 to 1e9, or the score not finite.
    pub fn validate(&self) -> Result<()> {
        self.program().validate()?;
        at_least_one("workers", self.workers)?;
        check_limits(self.time_limit_seconds, self.start_limit_seconds)?;
        Ok(finite("timeout_score", self.timeout_score.into())?)
    }

    /// Checks that the folder, the program and the script that it runs are there. Starts nothing.
    ///
    /// # Errors
    ///
    /// If one of them is missing.
    pub fn check_files(&self) -> Result<()> {
        self.program().check_files()
    }

    /// Returns the files that decide scores: the program if it is given by its path, arguments that
    /// are files, the module of `python -m`, and the local Python modules that these import.
    pub fn files(&self) -> Vec<PathBuf> {
        self.program().files()
    }

    fn program(&self) -> Program {
        let (limit, start_limit) = (self.time_limit_seconds, self.start_limit_seconds);
        Program::new(&self.command, self.folder.as_ref(), limit, start_limit)
    }
}

impl RewardOptions for ProgramConfig {
    fn validate(&self) -> Result<()> {
        Self::validate(self)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(ProgramReward::new(self.clone())?))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::from_files(self.files())
    }

    fn check_inputs(&self) -> Result<()> {
        self.check_files()
    }
}

/// A program that reads one line of JSON for each completion and writes one line with its score.
///
/// A request is an object with `id`, `prompt`, `completion`, `finish_reason`, `completion_tokens`
/// (their number) and `columns`. An answer is a number, or an object with the number at `score`.
/// `null` in its place is [`Score::NONE`]. Answers come in the order of the requests, or echo the
/// `id` of the request, in any order.
///
/// The program must answer each line when it comes, flush each answer, write nothing else to
/// stdout, and end when its input does. It ends with this process too, even if that is killed.
///
/// A program that echoes ids is started once and keeps running between batches. Without ids an
/// additional line would shift the scores after it, and its time of arrival does not show that. So
/// a program without ids gets one batch: its input ends, and it must write exactly one line for
/// each request until its output ends. For the next batch it is started again, in advance.
///
/// If it ends, or gives no score for longer than the limit, it is started again. The completions
/// without a score are then sent one at a time. A completion with which it fails alone has the
/// score of [`ProgramConfig::on_timeout`]. A program that fails from the first completion on, or
/// with more than [`ProgramConfig::max_failures`] in a row, is an error. One that exceeds the
/// time or ends twice before its first answer is an error at once.
///
/// ```no_run
/// use candle_grpo_rewards::{ProgramConfig, ProgramReward};
///
/// let config: ProgramConfig = serde_json::from_str(r#"{"command": ["python3", "reward.py"]}"#)?;
/// let reward = ProgramReward::new(config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ProgramReward {
    config: ProgramConfig,
    progress: Arc<dyn Progress>,
    workers: Vec<Mutex<Worker>>,
    shared: Shared,
}

impl ProgramReward {
    /// Starts the program.
    ///
    /// # Errors
    ///
    /// If `config` is not valid or the program cannot be started.
    pub fn new(config: ProgramConfig) -> Result<Self> {
        config.validate()?;
        let workers = (0..config.workers).map(|_| Ok(Mutex::new(Worker::start(&config)?)));
        Ok(Self {
            workers: workers.collect::<Result<_>>()?,
            progress: Arc::new(NoProgress),
            shared: Shared::default(),
            config,
        })
    }

    /// The scores of `samples`, which the workers share. A worker has every n-th of them, so that
    /// the shares do not depend on the speed of the workers.
    fn share_out(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let n = self.workers.len().min(samples.len());
        let shares = self.workers.iter().take(n).enumerate();
        let shares: Vec<(_, Vec<Sample>)> = shares
            .map(|(first, worker)| {
                let share = samples.iter().skip(first).step_by(n);
                (worker, share.copied().collect())
            })
            .collect();
        let shares = in_parallel(&shares, |(worker, samples)| {
            let progress = self.progress.as_ref();
            lock(worker).score(&self.config, samples, progress, &self.shared)
        });
        let mut scores = vec![Score::NONE; samples.len()];
        for (first, share) in shares.into_iter().enumerate() {
            let places = scores.iter_mut().skip(first).step_by(n);
            places.zip(share?).for_each(|(place, score)| *place = score);
        }
        Ok(scores)
    }

    /// Returns an error if the program has failed from the first completion on.
    fn ensure_works(&self) -> Result<()> {
        let mut failed = None;
        for worker in &self.workers {
            let mut worker = lock(worker);
            if worker.has_scored() {
                return Ok(());
            }
            failed = worker.take_error().or(failed);
        }
        match failed {
            Some(error) => Err(error.context("failed with every completion so far")),
            None => Ok(()),
        }
    }
}

/// After a panic a worker has a program or none, and either will do.
fn lock(worker: &Mutex<Worker>) -> MutexGuard<'_, Worker> {
    worker.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RewardFunction for ProgramReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let score = || -> Result<Vec<Score>> {
            let scores = self.share_out(samples)?;
            self.ensure_works()?;
            Ok(scores)
        };
        score().with_context(|| format!("program {:?}", self.config.command))
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }

    fn finish(&self) -> Result<()> {
        let mut workers = self.workers.iter();
        workers
            .try_for_each(|worker| lock(worker).finish())
            .with_context(|| format!("program {:?}", self.config.command))
    }
}
