//! A run directory during the run: what is due, and what is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_grpo_train::progress::Phase;
use candle_grpo_train::run::{ReplacedRun, StepRecord, Tracker, TrackerConfig};
use candle_grpo_train::{Pretrained, Progress, RunDir};
use serde::{Deserialize, Serialize};

use super::resume::{Identity, RunTrainer, open, warn_of_set_aside};
use crate::config::CheckpointConfig;

/// The start of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a new directory.
    New,
    /// Replacing an existing run, which is removed once the new run has a checkpoint.
    Replace,
    /// From an existing run's last checkpoint, or from step 0 if there is none. A different model,
    /// different held-out rows or another run's settings are errors.
    Resume,
    /// [`Self::Resume`], accepting such changes.
    ResumeChanged,
}

/// A run's schedule and directory.
pub(super) struct Plan {
    pub(super) run_dir: PathBuf,
    pub(super) last_step: usize,
    /// The steps between evaluations; `None`: no evaluations.
    pub(super) evaluation_steps: Option<usize>,
    pub(super) checkpoint: CheckpointConfig,
    pub(super) trackers: Vec<TrackerConfig>,
}

/// A run's next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Evaluation,
    Checkpoint,
    Step,
    End,
}

/// A run directory during the run. Rank 0 writes it; all ranks have its state.
pub(super) struct RunFolder<M> {
    plan: Plan,
    /// The directory, on rank 0.
    dir: Option<RunDir>,
    /// The programs that follow the metrics, on rank 0.
    trackers: Vec<Tracker>,
    /// The replaced run, until this run has a checkpoint.
    replaced: Option<ReplacedRun>,
    metrics: Vec<M>,
    /// The steps of the last evaluation and checkpoint.
    evaluated: Option<usize>,
    saved: Option<usize>,
    /// The best evaluation's step.
    best: Option<usize>,
    progress: Arc<dyn Progress>,
}

/// The run state that rank 0 reads from the directory.
#[derive(Serialize, Deserialize)]
struct Shared<M> {
    /// The checkpoint that the run resumes from.
    checkpoint: Option<PathBuf>,
    metrics: Vec<M>,
    evaluated: Option<usize>,
    best: Option<usize>,
}

impl<M: StepRecord + Clone> RunFolder<M> {
    /// Creates, replaces or resumes the directory. On resume, loads the last checkpoint into
    /// `trainer`. All ranks must call it.
    ///
    /// # Errors
    ///
    /// Returns an error if the ranks have different settings or inputs, or the directory does not
    /// allow it.
    pub(super) fn open<T: RunTrainer<Record = M>>(
        plan: Plan,
        identity: &Identity,
        trainer: &mut T,
        start: Start,
        progress: Arc<dyn Progress>,
    ) -> Result<Self> {
        let own = serde_json::to_string(&(&identity.settings, &identity.inputs))?;
        if let Some((rank, _)) = trainer.ranks().first_difference(own)? {
            bail!(
                "configuration, model, data and rewards: rank {rank} differs from rank 0, must be the same on all ranks"
            );
        }
        let mut opened = if trainer.ranks().is_first() {
            Some(open(&plan.run_dir, identity, trainer, start)?)
        } else {
            None
        };
        // Metrics are written in a format that names its fields.
        let shared = opened.as_mut().map(|opened| Shared {
            checkpoint: opened.checkpoint.take(),
            metrics: std::mem::take(&mut opened.metrics),
            evaluated: opened.dir.last_evaluation(),
            best: opened.dir.best_step(),
        });
        let shared = shared.as_ref().map(serde_json::to_string).transpose()?;
        let shared: Shared<M> = serde_json::from_str(&trainer.ranks().from_first(shared)?)?;
        if let (None, Some(checkpoint)) = (&opened, &shared.checkpoint) {
            trainer.load_state(checkpoint)?;
        }
        let step = trainer.steps();
        // The first weights are among the inputs.
        if step > 0 {
            trainer.ensure_equal_ranks()?;
        }
        let mut trackers = Vec::new();
        if let Some(opened) = &opened {
            let path = opened.dir.path();
            for (i, tracker) in plan.trackers.iter().enumerate() {
                let tracker = Tracker::start(tracker, path, &identity.settings, step);
                trackers.push(tracker.with_context(|| format!("trackers[{i}]"))?);
            }
        }
        let (dir, replaced) = match opened {
            Some(opened) => (Some(opened.dir), opened.replaced),
            None => (None, None),
        };
        Ok(Self {
            plan,
            dir,
            trackers,
            replaced,
            metrics: shared.metrics,
            evaluated: shared.evaluated,
            saved: (step > 0).then_some(step),
            best: shared.best,
            progress,
        })
    }

    /// Returns the next action after `step` steps.
    ///
    /// Evaluations come before the first step, after each multiple of their interval, and after the
    /// last step.
    pub(super) fn due(&self, step: usize) -> Due {
        let is_last = step == self.plan.last_step;
        let evaluates = |every: usize| step.is_multiple_of(every) || is_last;
        let every = self.plan.checkpoint.every_steps;
        let saves = every.is_some_and(|every| step.is_multiple_of(every))
            || is_last
            || self.plan.checkpoint.keep_best && self.best == Some(step);
        if self.plan.evaluation_steps.is_some_and(evaluates) && self.evaluated != Some(step) {
            Due::Evaluation
        } else if step > 0 && self.saved != Some(step) && saves {
            Due::Checkpoint
        } else if step >= self.plan.last_step {
            Due::End
        } else {
            Due::Step
        }
    }

    pub(super) fn last_step(&self) -> usize {
        self.plan.last_step
    }

    /// Returns the directory, on rank 0.
    pub(super) fn dir(&mut self) -> Option<&mut RunDir> {
        self.dir.as_mut()
    }

    /// Writes a step's metrics.
    pub(super) fn append_step(&mut self, metrics: &M) -> Result<()> {
        if let Some(dir) = &mut self.dir {
            dir.append_metrics(metrics)?;
        }
        for tracker in &mut self.trackers {
            tracker.step(metrics)?;
        }
        self.metrics.push(metrics.clone());
        Ok(())
    }

    /// Records the metrics for an evaluation after `step` steps, which `append` writes.
    pub(super) fn append_evaluation<T: RunTrainer<Record = M>>(
        &mut self,
        step: usize,
        metrics: &BTreeMap<String, f64>,
        trainer: &T,
        append: impl FnOnce(&mut RunDir) -> Result<()>,
    ) -> Result<()> {
        let best = match &mut self.dir {
            Some(dir) => {
                append(dir)?;
                Some(dir.best_step())
            }
            None => None,
        };
        for tracker in &mut self.trackers {
            tracker.evaluation(step, metrics);
        }
        self.best = trainer.ranks().from_first(best)?;
        self.evaluated = Some(step);
        Ok(())
    }

    /// [`Self::save`], unless there is no step to save.
    pub(super) fn save_unsaved<T: RunTrainer<Record = M>>(
        &mut self,
        trainer: &T,
        model: &Pretrained,
    ) -> Result<()> {
        let step = trainer.steps();
        if self.saved != Some(step) && step > 0 {
            self.save(trainer, model)?;
        }
        Ok(())
    }

    /// Writes a checkpoint, and removes old ones.
    pub(super) fn save<T: RunTrainer<Record = M>>(
        &mut self,
        trainer: &T,
        model: &Pretrained,
    ) -> Result<PathBuf> {
        let step = trainer.steps();
        let checkpoints = RunDir::checkpoints(self.path());
        trainer.ensure_equal_ranks()?;
        let Some(dir) = &self.dir else {
            trainer.take_part_in_checkpoint()?;
            self.saved = Some(step);
            return Ok(checkpoints.path(step));
        };
        dir.sync()?;
        self.progress.begin(Phase::Save, 1);
        let dtype = self.plan.checkpoint.dtype;
        let path = checkpoints.write(step, |folder| {
            trainer.write_checkpoint(folder, model, dtype)
        })?;
        self.saved = Some(step);
        if let Some(replaced) = self.replaced.take() {
            let folder = replaced.path().display().to_string();
            // An error here does not end the new run.
            match replaced.remove() {
                Ok(()) => tracing::info!("removed the previous run"),
                Err(error) => tracing::warn!("the previous run is kept in {folder}: {error:#}"),
            }
        }
        self.prune()?;
        self.progress.advance(1, 0);
        tracing::info!("checkpoint {}", path.display());
        Ok(path)
    }

    /// Removes old checkpoints.
    fn prune(&self) -> Result<()> {
        let best = self.best.filter(|_| self.plan.checkpoint.keep_best);
        let checkpoints = RunDir::checkpoints(self.path());
        let pruned = checkpoints.prune(self.plan.checkpoint.keep, best.as_slice())?;
        warn_of_set_aside(&pruned);
        Ok(())
    }

    /// Removes checkpoints that an interrupted program left behind.
    pub(super) fn tidy(&self) -> Result<()> {
        match self.dir {
            Some(_) => self.prune(),
            None => Ok(()),
        }
    }

    /// Reports the end of the run to its trackers, and waits for them unless the run is canceled.
    pub(super) fn finish_trackers(&mut self) {
        let progress = &*self.progress;
        let trackers = self.trackers.drain(..);
        trackers.for_each(|tracker| tracker.finish(progress));
    }

    /// Returns the directory's path.
    pub(super) fn path(&self) -> &Path {
        match &self.dir {
            Some(dir) => dir.path(),
            None => &self.plan.run_dir,
        }
    }

    /// Returns the replaced run's directory, until this run has a checkpoint.
    pub(super) fn replaced(&self) -> Option<&Path> {
        self.replaced.as_ref().map(ReplacedRun::path)
    }

    /// Returns the metrics for all steps, including those before a resume.
    pub(super) fn metrics(&self) -> &[M] {
        &self.metrics
    }
}
