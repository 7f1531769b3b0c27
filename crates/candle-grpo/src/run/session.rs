//! A run, from its first step to its last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::{
    Interrupted, Phase, Pretrained, Prompt, ReplacedRun, RewardFunction, RunDir, RunLock,
    SamplingConfig, StepMetrics, Trainer,
};
use serde_json::Value;

use super::evaluation::evaluate_policy;
use super::prompts::RunPrompts;
use crate::config::{EvaluationConfig, RunConfig};

/// How a run begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a folder that is not there yet.
    New,
    /// In place of a run that is there, which is removed once the new run has a checkpoint.
    Replace,
    /// From the last checkpoint of the run that is there; from the start, if there is none yet.
    Resume,
}

/// What a [`Session`] has done.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A step.
    Step(StepMetrics),
    /// An evaluation: its figures.
    Evaluated {
        /// After so many steps.
        step: usize,
        /// `reward_mean`, `response_length` and what the configuration asks for.
        figures: BTreeMap<String, f64>,
    },
    /// A checkpoint: where it is.
    Saved(PathBuf),
    /// The progress wanted it to stop, and it has saved where it was.
    Interrupted,
    /// All steps are made.
    Finished,
}

/// A run of a configuration, which keeps what there is to keep.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use candle_grpo::config::RunConfig;
/// use candle_grpo::run::{Progress, RunPrompts, Session, Start, load_model};
/// use candle_grpo::train::{Sample, NoProgress};
///
/// let config = RunConfig::read(Path::new("run.yaml"))?;
/// let pretrained = load_model(&config.model)?;
/// let prompts = RunPrompts::new(&config, &config.data.load(config.seed())?, &pretrained)?;
/// let shorter = |sample: &Sample| -(sample.completion_tokens.len() as f32);
/// let progress = Arc::new(NoProgress);
/// let mut session = Session::new(config, pretrained, prompts, shorter, Start::New, progress)?;
/// loop {
///     match session.advance()? {
///         Progress::Step(metrics) => println!("step {}: {:.3}", metrics.step, metrics.reward_mean),
///         Progress::Finished => break,
///         _ => {}
///     }
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Session {
    config: RunConfig,
    /// How evaluations draw, with the stop tokens of the model.
    evaluation: EvaluationConfig,
    pretrained: Pretrained,
    held_out: Vec<Prompt>,
    trainer: Trainer,
    dir: RunDir,
    /// The run that this one replaces, until this one has a checkpoint.
    replaced: Option<ReplacedRun>,
    metrics: Vec<StepMetrics>,
    /// After how many steps the last evaluation and the last checkpoint were made.
    evaluated: Option<usize>,
    saved: Option<usize>,
    /// After how many steps the evaluation was best.
    best: Option<usize>,
    progress: Arc<dyn candle_grpo_train::Progress>,
}

impl Session {
    /// Makes everything ready: trainer, folder, and what was saved if it resumes. [`RunConfig::threads`] is the caller's to set.
    ///
    /// The weights of `pretrained` are those that train.
    pub fn new(
        config: RunConfig,
        pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
    ) -> Result<Self> {
        let RunPrompts { train, held_out } = prompts;
        let sampling = |sampling: &SamplingConfig| pretrained.sampling(sampling.clone());
        let evaluation = EvaluationConfig {
            sampler: sampling(&config.evaluation.sampler),
            ..config.evaluation.clone()
        };
        let mut settings = config.train.clone();
        settings.sampling = sampling(&settings.sampling);
        for (prompts, sampling) in [
            (&train, &settings.sampling),
            (&held_out, &evaluation.sampler),
        ] {
            ensure_positions(prompts, sampling, &pretrained)?;
        }
        let mut trainer = Trainer::new(
            pretrained.model.clone(),
            pretrained.parameters.clone(),
            pretrained.tokenizer.clone(),
            train,
            reward,
            settings,
        )?
        .with_progress(Arc::clone(&progress));
        let (dir, metrics, replaced) = open(&config, &mut trainer, start)?;
        let step = trainer.steps();
        let evaluations = dir.evaluations()?;
        Ok(Self {
            evaluated: evaluations.last().map(|(step, _)| *step),
            saved: (step > 0).then_some(step),
            best: dir.best_step()?,
            config,
            evaluation,
            pretrained,
            held_out,
            trainer,
            dir,
            replaced,
            metrics,
            progress,
        })
    }

    /// Does what is due next: an evaluation, a checkpoint or a step.
    ///
    /// Whenever it errs or the program is killed, the run can be resumed from its last checkpoint. An error that is
    /// [`NotFinite`](candle_grpo_train::NotFinite) says which tensor was.
    pub fn advance(&mut self) -> Result<Progress> {
        let step = self.trainer.steps();
        let done = if self.is_evaluation_due(step) {
            self.evaluate(step)
        } else if self.is_checkpoint_due(step) {
            return self.save(step).map(Progress::Saved);
        } else if step >= self.config.max_steps {
            self.dir.write_plot(&self.metrics)?;
            return Ok(Progress::Finished);
        } else {
            self.step()
        };
        match done {
            Err(error) if error.is::<Interrupted>() => {
                if self.saved != Some(step) && step > 0 {
                    self.save(step)?;
                }
                Ok(Progress::Interrupted)
            }
            done => done,
        }
    }

    fn step(&mut self) -> Result<Progress> {
        let metrics = self.trainer.step()?;
        self.dir.append_metrics(&metrics)?;
        self.metrics.push(metrics.clone());
        Ok(Progress::Step(metrics))
    }

    /// Before the first step, after each multiple of so many, and after the last.
    fn is_evaluation_due(&self, step: usize) -> bool {
        let Some(every) = self.evaluation.every_steps else {
            return false;
        };
        !self.held_out.is_empty()
            && self.evaluated != Some(step)
            && (step.is_multiple_of(every) || step == self.config.max_steps)
    }

    fn is_checkpoint_due(&self, step: usize) -> bool {
        let every = self.config.checkpoint.every_steps;
        step > 0
            && self.saved != Some(step)
            && (every.is_some_and(|every| step.is_multiple_of(every))
                || step == self.config.max_steps
                || self.config.checkpoint.keep_best && self.best == Some(step))
    }

    fn evaluate(&mut self, step: usize) -> Result<Progress> {
        let config = &self.evaluation;
        let evaluation = evaluate_policy(
            &self.trainer.sampler(config.sampler.clone())?,
            &self.held_out,
            self.trainer.reward(),
            self.trainer.tokenizer(),
            config,
            &*self.progress,
        )?;
        let figures = evaluation.figures(&config.pass_at, config.pass_reward)?;
        self.dir.append_evaluation(step, &evaluation, &figures)?;
        self.best = self.dir.best_step()?;
        self.evaluated = Some(step);
        Ok(Progress::Evaluated { step, figures })
    }

    /// Writes a checkpoint, and removes those that are not to be kept.
    fn save(&mut self, step: usize) -> Result<PathBuf> {
        let checkpoints = RunDir::checkpoints(self.dir.path());
        self.dir.sync()?;
        self.progress.begin(Phase::Save, 1);
        let path = checkpoints.write(step, |folder| {
            self.trainer.write_checkpoint(folder, &self.pretrained)
        })?;
        self.saved = Some(step);
        if let Some(replaced) = self.replaced.take() {
            let folder = replaced.path().display().to_string();
            // The new run goes on all the same.
            match replaced.remove() {
                Ok(()) => tracing::info!("the previous run is removed"),
                Err(error) => tracing::warn!("the previous run is kept in {folder}: {error:#}"),
            }
        }
        let best = self.best.filter(|_| self.config.checkpoint.keep_best);
        checkpoints.prune(self.config.checkpoint.keep, best.as_slice())?;
        self.dir.write_plot(&self.metrics)?;
        self.progress.advance(1, 0);
        tracing::info!("checkpoint {}", path.display());
        Ok(path)
    }

    /// The settings.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the folder of the run that this one replaces, as long as this one has no checkpoint.
    pub fn replaced(&self) -> Option<&Path> {
        self.replaced.as_ref().map(ReplacedRun::path)
    }

    /// What trains.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// The figures of all steps, those before it was resumed included.
    pub fn metrics(&self) -> &[StepMetrics] {
        &self.metrics
    }
}

/// Errs unless every prompt and a completion fit into the positions of the model: now, rather than when the prompt comes.
fn ensure_positions(
    prompts: &[Prompt],
    sampling: &SamplingConfig,
    pretrained: &Pretrained,
) -> Result<()> {
    let positions = pretrained.model.max_position_embeddings;
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max();
    let longest = longest.unwrap_or(0);
    ensure!(
        longest.saturating_add(sampling.max_new_tokens) <= positions,
        "response_length: {} tokens after a prompt of {longest} make more than the {positions} positions of the model; lower it, or prompt_length",
        sampling.max_new_tokens
    );
    Ok(())
}

/// The folder of the run, and the steps that were made there; `trainer` goes on from the last checkpoint.
fn open(
    config: &RunConfig,
    trainer: &mut Trainer,
    start: Start,
) -> Result<(RunDir, Vec<StepMetrics>, Option<ReplacedRun>)> {
    let path = &config.run_dir;
    let settings = config.to_value()?;
    let fresh = |dir: Result<RunDir>| Ok((dir?, Vec::new(), None));
    match start {
        Start::New => fresh(RunDir::create(path, &settings)),
        Start::Replace => {
            let (dir, replaced) = RunDir::replace(path, &settings)?;
            if let Some(replaced) = &replaced {
                tracing::info!(
                    "the previous run is kept in {} until this one has a checkpoint",
                    replaced.path().display()
                );
            }
            Ok((dir, Vec::new(), replaced))
        }
        Start::Resume if !RunDir::is_run(path) => fresh(RunDir::create(path, &settings)),
        Start::Resume => {
            // Before the checkpoints are looked at, which another program may be writing.
            let lock = RunLock::take(path)?;
            let found = RunDir::checkpoints(path).latest()?;
            for (checkpoint, what) in &found.damaged {
                tracing::warn!("{}: {what}; it is passed over", checkpoint.path.display());
            }
            if let Some(checkpoint) = &found.checkpoint {
                trainer.load_state(&checkpoint.path)?;
                tracing::info!("resuming from {}", checkpoint.path.display());
            } else if let Some((checkpoint, what)) = found.damaged.first() {
                bail!(
                    "{}: {what}, and no other checkpoint of the run is whole",
                    checkpoint.path.display()
                );
            } else {
                tracing::info!("{}: has no checkpoint yet, beginning anew", path.display());
            }
            for difference in differences(path, &settings)? {
                tracing::warn!("the run began with another {difference}");
            }
            let (dir, metrics) = RunDir::resume(lock, &settings, trainer.steps())?;
            Ok((dir, metrics, None))
        }
    }
}

/// The keys on which the settings of the run at `path` and `now` differ, with both values.
fn differences(path: &Path, now: &Value) -> Result<Vec<String>> {
    let config = path.join("config.json");
    let before = std::fs::read(&config).with_context(|| config.display().to_string())?;
    let before = serde_json::from_slice(&before).with_context(|| config.display().to_string())?;
    let mut found = Vec::new();
    compare("", &before, now, &mut found);
    Ok(found)
}

fn compare(path: &str, before: &Value, now: &Value, found: &mut Vec<String>) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            let keys: std::collections::BTreeSet<_> = before.keys().chain(now.keys()).collect();
            for key in keys {
                let of = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or(Value::Null)
                };
                let path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                compare(&path, &of(before), &of(now), found);
            }
        }
        (before, now) if before != now => found.push(format!("{path}: {before}, now {now}")),
        _ => {}
    }
}
