//! A run from its first step to its last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_train::progress::Phase;
use candle_grpo_train::rewards::BudgetExhausted;
use candle_grpo_train::run::{ReplacedRun, RunInputs, Tracker};
use candle_grpo_train::{
    Generator, Interrupted, Pretrained, Prompt, RewardFunction, RunDir, SamplingConfig,
    StepMetrics, Trainer,
};
use serde::{Deserialize, Serialize};

use super::engine::engine;
use super::evaluation::evaluate_policy;
use super::prompts::RunPrompts;
use super::resume::{open, warn_of_set_aside};
use super::teacher::load_teacher;
use crate::config::{EvaluationConfig, RunConfig};

/// The start of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a new folder.
    New,
    /// In place of an existing run, which is removed once the new run has a checkpoint.
    Replace,
    /// From the last checkpoint of an existing run, or from the beginning if there is none. Another
    /// model, other held-out rows and settings of another run are errors.
    Resume,
    /// [`Self::Resume`] with such changes accepted.
    ResumeChanged,
}

/// The result of [`Session::advance`].
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// A step.
    Step(Box<StepMetrics>),
    /// An evaluation and its metrics.
    Evaluated {
        /// The number of steps before it.
        step: usize,
        /// `reward_mean`, `response_length` and the metrics of the configuration.
        metrics: BTreeMap<String, f64>,
    },
    /// A checkpoint and its path.
    Saved(PathBuf),
    /// It was canceled, and has saved its state.
    Interrupted,
    /// All steps are done.
    Finished,
}

/// A run of a configuration: steps, evaluations and checkpoints.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use candle_grpo::config::RunConfig;
/// use candle_grpo::run::{Progress, RunPrompts, Session, Start, load_policy};
/// use candle_grpo::train::Sample;
/// use candle_grpo::train::progress::NoProgress;
///
/// let config = RunConfig::read(Path::new("run.yaml"))?;
/// let pretrained = load_policy(&config)?;
/// let (_, prompts) = RunPrompts::read(&config, &pretrained)?;
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
    /// The evaluation section, with the stop tokens of the model.
    evaluation: EvaluationConfig,
    pretrained: Pretrained,
    held_out: Vec<Prompt>,
    trainer: Trainer,
    /// The folder, on rank 0.
    dir: Option<RunDir>,
    /// The programs that follow the metrics, on rank 0.
    trackers: Vec<Tracker>,
    /// The replaced run, until this run has a checkpoint.
    replaced: Option<ReplacedRun>,
    metrics: Vec<StepMetrics>,
    /// The steps of the last evaluation and the last checkpoint.
    evaluated: Option<usize>,
    saved: Option<usize>,
    /// The step of the best evaluation.
    best: Option<usize>,
    progress: Arc<dyn candle_grpo_train::Progress>,
}

/// The state of a run that rank 0 reads from its folder.
#[derive(Serialize, Deserialize)]
struct Shared {
    /// The checkpoint that the run resumes from.
    checkpoint: Option<PathBuf>,
    metrics: Vec<StepMetrics>,
    evaluated: Option<usize>,
    best: Option<usize>,
}

impl Session {
    /// Creates the trainer and the folder, and loads the last checkpoint of a resumed run. The
    /// weights of `pretrained` are trained in place. Under adapters they do not train, and are
    /// converted to the dtype that the run computes in. [`RunConfig::threads`] is not applied here.
    ///
    /// # Errors
    ///
    /// Returns an error, before the folder changes, if the settings, the prompts and the model do
    /// not fit, or if the folder cannot be begun, replaced or resumed.
    pub fn new(
        config: RunConfig,
        pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
    ) -> Result<Self> {
        let alone = Arc::new(Alone);
        Self::on_ranks(config, pretrained, prompts, reward, start, progress, alone)
    }

    /// [`Self::new`] for one of several ranks that share the run. All ranks must call it with the
    /// same arguments, and then [`Self::advance`] as often. Rank 0 writes the folder; the others
    /// read its checkpoints when a run resumes.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`]. A rank that fails must end the job, with
    /// [`Collective::abort`]: the others wait for it.
    pub fn on_ranks(
        config: RunConfig,
        mut pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        collective: Arc<dyn Collective>,
    ) -> Result<Self> {
        let RunPrompts {
            train,
            held_out,
            order,
        } = prompts;
        pretrained.chat_template = config.chat_template(&pretrained)?;
        let (base, dtype) = config.train.stored_form();
        let model = &pretrained.model;
        pretrained.parameters = (pretrained.parameters).frozen_as(model, base, dtype.into())?;
        let sampling = |sampling: &SamplingConfig| pretrained.sampling(sampling.clone());
        let evaluation = EvaluationConfig {
            sampler: sampling(&config.evaluation.sampler),
            ..config.evaluation.clone()
        };
        let mut settings = config.train.clone();
        settings.sampling = sampling(&settings.sampling);
        config.check_model(&pretrained.model, &train, &held_out)?;
        config.check_training()?;
        let generator = engine(
            &settings.rollout,
            &settings.sampling,
            &pretrained,
            &RunDir::engine_weights(&config.run_dir),
            &train,
            true,
        )?;
        let inputs = RunInputs::new(&pretrained, &train, &held_out, &config.reward_files())?
            .with_hub_commits(config.hub_commits().clone());
        let environment = config.environment.as_ref();
        let stop_token_ids = settings.sampling.stop_token_ids.clone();
        let environments = environment.map(|config| config.build(&pretrained, &stop_token_ids));
        let environments = environments.transpose()?;
        let mut trainer = Trainer::new(
            pretrained.model.clone(),
            pretrained.parameters.clone(),
            pretrained.tokenizer.clone(),
            train,
            reward,
            settings,
        )?
        .with_collective(collective)?
        .with_progress(Arc::clone(&progress))
        .with_last_step(config.max_steps)
        .with_inputs(&inputs);
        trainer = match &config.data.curriculum {
            Some(pools) => trainer.with_curriculum(pools.clone())?,
            None => trainer.with_order(order)?,
        };
        if let Some(teacher) = load_teacher(&config)? {
            trainer = trainer.with_teacher(teacher);
        }
        if let Some(generator) = generator {
            trainer = trainer.with_generator(generator);
        }
        if let Some(environments) = environments {
            trainer = trainer.with_environments(Arc::new(environments));
        }
        let identity = serde_json::to_string(&(config.to_value()?, &inputs))?;
        let ranks = trainer.ranks();
        if let Some((rank, _)) = ranks.first_difference(identity)? {
            bail!(
                "configuration, model, data and rewards: those of rank {rank} differ from those of rank 0, must be the same on all ranks"
            );
        }
        let mut opened = match trainer.ranks().is_first() {
            true => Some(open(&config, &inputs, &mut trainer, start)?),
            false => None,
        };
        // Metrics are written in a format that names its fields.
        let shared = opened.as_mut().map(|opened| Shared {
            checkpoint: opened.checkpoint.take(),
            metrics: std::mem::take(&mut opened.metrics),
            evaluated: opened.dir.last_evaluation(),
            best: opened.dir.best_step(),
        });
        let shared = shared.as_ref().map(serde_json::to_string).transpose()?;
        let shared: Shared = serde_json::from_str(&trainer.ranks().from_first(shared)?)?;
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
            let (path, settings) = (opened.dir.path(), config.to_value()?);
            for (i, tracker) in config.trackers.iter().enumerate() {
                let tracker = Tracker::start(tracker, path, &settings, step);
                trackers.push(tracker.with_context(|| format!("trackers[{i}]"))?);
            }
        }
        let (dir, replaced) = match opened {
            Some(opened) => (Some(opened.dir), opened.replaced),
            None => (None, None),
        };
        Ok(Self {
            evaluated: shared.evaluated,
            saved: (step > 0).then_some(step),
            best: shared.best,
            config,
            evaluation,
            pretrained,
            held_out,
            trainer,
            dir,
            trackers,
            replaced,
            metrics: shared.metrics,
            progress,
        })
    }

    /// Draws all completions, of steps and evaluations, from `generator` in place of the policy in
    /// this process. The generator receives the weights before the first completion and after each
    /// update.
    pub fn with_generator(self, generator: Arc<dyn Generator>) -> Self {
        Self {
            trainer: self.trainer.with_generator(generator),
            ..self
        }
    }

    /// Performs the next evaluation, checkpoint or step.
    ///
    /// # Errors
    ///
    /// With [`NotFinite`](candle_grpo_train::NotFinite) and the name of the tensor if a loss, a
    /// gradient or a weight is not finite. After any error, or if the program is killed, the
    /// run can be resumed from its last checkpoint.
    pub fn advance(&mut self) -> Result<Progress> {
        let step = self.trainer.steps();
        let done = if self.is_evaluation_due(step) {
            self.evaluate(step)
        } else if self.is_checkpoint_due(step) {
            return self.save(step).map(Progress::Saved);
        } else if step >= self.config.max_steps {
            self.write_plot()?;
            self.trainer.finish()?;
            self.trackers.drain(..).for_each(Tracker::finish);
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
            Err(error) if error.is::<BudgetExhausted>() && self.trainer.ranks().is_alone() => {
                if self.saved != Some(step) && step > 0 {
                    self.save(step)?;
                }
                Err(error)
            }
            // Weights that are not finite show in logits first.
            Err(error) => Err(match self.trainer.ensure_finite() {
                Err(weights) => weights.context(format!("{error:#}")),
                Ok(()) => error,
            }),
            done => done,
        }
    }

    fn step(&mut self) -> Result<Progress> {
        let metrics = self.trainer.step()?;
        if let Some(dir) = &mut self.dir {
            let log = &self.config.rollout_log;
            if log.is_due(metrics.step) {
                dir.append_rollouts(&self.trainer.rollouts(log)?)?;
            }
            dir.append_metrics(&metrics)?;
        }
        for tracker in &mut self.trackers {
            tracker.step(&metrics)?;
        }
        self.metrics.push(metrics.clone());
        Ok(Progress::Step(Box::new(metrics)))
    }

    /// Before the first step, after each multiple of `every_steps`, and after the last step.
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
        self.trainer.ensure_not_canceled()?;
        let config = &self.evaluation;
        let evaluation = evaluate_policy(
            &self.trainer.sampler(config.sampler.clone())?,
            &self.held_out,
            self.trainer.reward(),
            self.trainer.tokenizer(),
            config,
            &*self.progress,
        )?;
        let metrics = evaluation.metrics(&config.pass_at, config.pass_reward)?;
        let best = match &mut self.dir {
            Some(dir) => {
                dir.append_evaluation(step, &evaluation, &metrics)?;
                Some(dir.best_step())
            }
            None => None,
        };
        for tracker in &mut self.trackers {
            tracker.evaluation(step, &metrics);
        }
        self.best = self.trainer.ranks().from_first(best)?;
        self.evaluated = Some(step);
        Ok(Progress::Evaluated { step, metrics })
    }

    /// Writes a checkpoint, and removes old ones.
    fn save(&mut self, step: usize) -> Result<PathBuf> {
        let checkpoints = RunDir::checkpoints(self.path());
        self.trainer.ensure_equal_ranks()?;
        let Some(dir) = &self.dir else {
            self.trainer.take_part_in_checkpoint()?;
            self.saved = Some(step);
            return Ok(checkpoints.path(step));
        };
        dir.sync()?;
        self.progress.begin(Phase::Save, 1);
        let dtype = self.config.checkpoint.dtype;
        let path = checkpoints.write(step, |folder| {
            self.trainer
                .write_checkpoint(folder, &self.pretrained, dtype)
        })?;
        self.saved = Some(step);
        if let Some(replaced) = self.replaced.take() {
            let folder = replaced.path().display().to_string();
            // An error here does not end the new run.
            match replaced.remove() {
                Ok(()) => tracing::info!("the previous run is removed"),
                Err(error) => tracing::warn!("the previous run is kept in {folder}: {error:#}"),
            }
        }
        let best = self.best.filter(|_| self.config.checkpoint.keep_best);
        let pruned = checkpoints.prune(self.config.checkpoint.keep, best.as_slice())?;
        warn_of_set_aside(&pruned);
        self.write_plot()?;
        self.progress.advance(1, 0);
        tracing::info!("checkpoint {}", path.display());
        Ok(path)
    }

    fn write_plot(&self) -> Result<()> {
        match &self.dir {
            Some(dir) => dir.write_plot(&self.metrics),
            None => Ok(()),
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the folder of the run.
    pub fn path(&self) -> &Path {
        match &self.dir {
            Some(dir) => dir.path(),
            None => &self.config.run_dir,
        }
    }

    /// Returns the folder of the replaced run until this run has a checkpoint.
    pub fn replaced(&self) -> Option<&Path> {
        self.replaced.as_ref().map(ReplacedRun::path)
    }

    /// The trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// The metrics of all steps, those before a resume included.
    pub fn metrics(&self) -> &[StepMetrics] {
        &self.metrics
    }
}
