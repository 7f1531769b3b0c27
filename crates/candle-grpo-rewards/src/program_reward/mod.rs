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

use self::answer::Verdict;
use self::worker::{Shared, Worker};
use super::options::{RewardInputs, RewardOptions};
use super::weighted::in_parallel;
use super::{OnFailure, Score, Scores};
use crate::program::{Program, check_limits};
use crate::{Progress, RewardFunction, Sample};
use candle_grpo_base::progress::NoProgress;

/// Options for [`ProgramReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramConfig {
    /// Program and arguments. They are not passed through a shell.
    pub command: Vec<String>,
    /// Working directory; absent: this process's.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Parallel processes, which share each batch.
    #[serde(default = "workers")]
    pub workers: usize,
    /// Maximum time for one completion's score, in seconds.
    #[serde(default = "time_limit")]
    pub time_limit_seconds: f64,
    /// Additional time for its start, before the first score, in seconds.
    #[serde(default = "start_limit")]
    pub start_limit_seconds: f64,
    /// Treatment for a completion on which the program exceeds its time or ends: `score` or
    /// `exclude`.
    #[serde(default)]
    pub on_timeout: OnFailure,
    /// Score for such a completion, if `on_timeout` is `score`.
    #[serde(default)]
    pub timeout_score: f32,
    /// Number of consecutive completions that may fail in a process. One more ends the run.
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
    /// Checks the options. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// Fails if the command is empty, there are no workers, or the score is not finite. Also fails
    /// if `time_limit_seconds` is not above 0 and at most 1e9, or if `start_limit_seconds` is not
    /// from 0 to 1e9.
    pub fn validate(&self) -> Result<()> {
        self.program().validate()?;
        at_least_one("workers", self.workers)?;
        check_limits(self.time_limit_seconds, self.start_limit_seconds)?;
        Ok(finite("timeout_score", self.timeout_score.into())?)
    }

    /// Checks that the directory, the program and its script exist. Starts nothing.
    ///
    /// # Errors
    ///
    /// Fails if one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.program().check_files()
    }

    /// Returns the files that determine scores: the program if it is given as a path, arguments
    /// that are files, the module in `python -m`, and the local Python modules that these import.
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

/// A program that reads one JSON line for each completion and writes one line with its score.
///
/// Use it if your reward already exists in another language. Echo the `id`: the program then starts
/// once, and may answer in any order.
///
/// A request is an object with `id`, `prompt`, `completion`, `finish_reason`, `completion_tokens`
/// (their number) and `columns`. An answer is a number, or an object with the number in `score`,
/// which may have a text in `feedback` for a teacher. `null` instead of the number is
/// [`Score::NONE`]. Answers either follow the request order, or
/// echo the request's `id` and come in any order.
///
/// The program must answer each line when it comes, flush each answer, write nothing else to
/// stdout, and exit when its input ends. It ends with this process too, even if this process is
/// killed.
///
/// # Ids
///
/// A program that echoes ids starts once and keeps running between batches. Without ids, an extra
/// line would shift the scores after it, and its arrival time does not reveal that. Therefore, a
/// program without ids gets one batch: its input ends, and it must write exactly one line for each
/// request until its output ends. It is restarted for the next batch, in advance.
///
/// # Failures
///
/// If the program ends, or returns no score within the limit, it is restarted. The completions
/// without a score are then sent one at a time. If it fails on a completion alone,
/// [`ProgramConfig::on_timeout`] determines the score. A program that fails from the first
/// completion on, or on more than [`ProgramConfig::max_failures`] in a row, is an error. If it
/// exceeds its time or ends twice before its first answer, that is an error at once.
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
    /// Fails if `config` is invalid, or if the program cannot be started.
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

    /// Scores `samples`, which the workers share. Each of n workers scores every n-th sample, so
    /// the shares do not depend on the workers' speed.
    fn share_out(&self, samples: &[Sample]) -> Result<Vec<Verdict>> {
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
        let mut scores = vec![Verdict::from(Score::NONE); samples.len()];
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

/// Locks a worker. After a panic, it has a program or none, and either is fine.
fn lock(worker: &Mutex<Worker>) -> MutexGuard<'_, Worker> {
    worker.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RewardFunction for ProgramReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(self.scores(samples)?.iter_scores().collect())
    }

    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        let score = || -> Result<Scores> {
            let verdicts = self.share_out(samples)?;
            self.ensure_works()?;
            let verdicts = verdicts.into_iter();
            let (scores, feedback) = verdicts.map(|x| (x.score, x.feedback)).unzip();
            Scores::new(scores, samples)?.with_feedback(feedback)
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
