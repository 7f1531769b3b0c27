//! The loop behind every run, the same for all trainers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};
use candle_grpo_train::{Interrupted, Pretrained, StepMetrics};

use super::folder::{Due, RunFolder};
use super::resume::RunTrainer;

/// The result of [`RunSession::advance`]. `M` is the type of a step's metrics.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress<M = StepMetrics> {
    /// A step.
    Step(Box<M>),
    /// An evaluation and its metrics.
    Evaluated {
        /// The number of steps before it.
        step: usize,
        /// `reward_mean`, `response_length` and the configured metrics; in supervised training the
        /// metrics from
        /// [`LikelihoodSums::evaluation`](candle_grpo_train::learn::LikelihoodSums::evaluation).
        metrics: BTreeMap<String, f64>,
    },
    /// A checkpoint and its path.
    Saved(PathBuf),
    /// The run was canceled, and its state is saved.
    Interrupted,
    /// All steps are done.
    Finished,
}

/// A configured run that advances by steps, evaluations and checkpoints: a
/// [`Session`](super::Session) or an [`SftSession`](super::SftSession).
pub trait RunSession {
    /// A step's metrics.
    type Metrics;

    /// Performs the next evaluation, checkpoint or step.
    ///
    /// # Errors
    ///
    /// Returns [`NotFinite`](candle_grpo_train::NotFinite) with the tensor's name if a loss, a
    /// gradient or a weight is not finite. After any error, or if the program is killed, the run
    /// can be resumed from its last checkpoint.
    fn advance(&mut self) -> Result<Progress<Self::Metrics>>;

    /// Returns how many steps are done, including those before a resume.
    fn steps(&self) -> usize;

    /// Returns how many steps the whole run has.
    fn last_step(&self) -> usize;

    /// Returns the run directory.
    fn path(&self) -> &Path;

    /// Returns the replaced run's directory, until this run has a checkpoint.
    fn replaced(&self) -> Option<&Path>;

    /// Returns the metrics for all steps, including those before a resume.
    fn metrics(&self) -> &[Self::Metrics];
}

/// A run's trainer, model and directory.
pub struct Run<T: RunTrainer> {
    pub(super) trainer: T,
    pub(super) pretrained: Pretrained,
    pub(super) folder: RunFolder<T::Record>,
}

/// The steps and evaluations that differ between kinds of runs.
pub trait Actions {
    type Trainer: RunTrainer;

    fn run(&self) -> &Run<Self::Trainer>;
    fn run_mut(&mut self) -> &mut Run<Self::Trainer>;

    /// Makes a step.
    fn step(&mut self) -> Result<<Self::Trainer as RunTrainer>::Record>;

    /// Evaluates the policy after `step` steps, and records the result in the run directory.
    fn evaluate(&mut self, step: usize) -> Result<BTreeMap<String, f64>>;

    /// Finishes the run after its last step.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns whether the steps before an error of the run are saved.
    fn saves_after(&self, _error: &Error) -> bool {
        false
    }
}

impl<S: Actions> RunSession for S {
    type Metrics = <S::Trainer as RunTrainer>::Record;

    fn advance(&mut self) -> Result<Progress<Self::Metrics>> {
        let step = self.steps();
        let done = match self.run().folder.due(step) {
            Due::Evaluation => self
                .evaluate(step)
                .map(|metrics| Progress::Evaluated { step, metrics }),
            Due::Checkpoint => {
                let run = self.run_mut();
                let path = run.folder.save(&run.trainer, &run.pretrained)?;
                return Ok(Progress::Saved(path));
            }
            Due::End => {
                self.run().folder.tidy()?;
                self.finish()?;
                self.run_mut().folder.finish_trackers();
                return Ok(Progress::Finished);
            }
            Due::Step => self.step().and_then(|metrics| {
                self.run_mut().folder.append_step(&metrics)?;
                Ok(Progress::Step(Box::new(metrics)))
            }),
        };
        let error = match done {
            Ok(progress) => return Ok(progress),
            Err(error) => error,
        };
        let (interrupted, saves) = (error.is::<Interrupted>(), self.saves_after(&error));
        let run = self.run_mut();
        if interrupted || saves {
            run.folder.save_unsaved(&run.trainer, &run.pretrained)?;
        }
        match (interrupted, saves) {
            (true, _) => Ok(Progress::Interrupted),
            (_, true) => Err(error),
            _ => Err(not_finite_first(error, &run.trainer)),
        }
    }

    fn steps(&self) -> usize {
        self.run().trainer.steps()
    }

    fn last_step(&self) -> usize {
        self.run().folder.last_step()
    }

    fn path(&self) -> &Path {
        self.run().folder.path()
    }

    fn replaced(&self) -> Option<&Path> {
        self.run().folder.replaced()
    }

    fn metrics(&self) -> &[Self::Metrics] {
        self.run().folder.metrics()
    }
}

/// The error of a step. Weights that are not finite show in logits first.
fn not_finite_first(error: Error, trainer: &impl RunTrainer) -> Error {
    match trainer.ensure_finite() {
        Err(weights) => weights.context(format!("{error:#}")),
        Ok(()) => error,
    }
}
