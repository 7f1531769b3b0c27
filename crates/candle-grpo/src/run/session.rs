//! A run from its first step to its last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_train::learn::Ranks;
use candle_grpo_train::rewards::BudgetExhausted;
use candle_grpo_train::run::{RunInputs, prompt_digest};
use candle_grpo_train::{
    ComputeDType, Generator, Interrupted, Pretrained, Prompt, RewardFunction, RunDir,
    SamplingConfig, StepMetrics, Trainer,
};

use super::engine::engine;
use super::evaluation::evaluate_policy;
use super::folder::{Due, Plan, RunFolder, Start};
use super::prompts::RunPrompts;
use super::resume::{Identity, MAY_CHANGE, RunTrainer};
use super::teacher::load_teacher;
use crate::config::{Configuration, EvaluationConfig, RunConfig};

/// The result of [`Session::advance`] and [`SftSession::advance`](super::SftSession::advance). `M`
/// are the metrics of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress<M = StepMetrics> {
    /// A step.
    Step(Box<M>),
    /// An evaluation and its metrics.
    Evaluated {
        /// The number of steps before it.
        step: usize,
        /// `reward_mean`, `response_length` and the metrics of the configuration; in supervised
        /// training those of
        /// [`LikelihoodSums::evaluation`](candle_grpo_train::learn::LikelihoodSums::evaluation).
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
    folder: RunFolder<StepMetrics>,
    progress: Arc<dyn candle_grpo_train::Progress>,
}

impl RunTrainer for Trainer {
    type Record = StepMetrics;
    const MAY_CHANGE: &'static [&'static str] = &MAY_CHANGE;

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
        let rows = trainer.prompts().iter();
        let identity = Identity {
            settings: config.to_value()?,
            train: rows.map(prompt_digest).collect(),
            inputs,
        };
        let plan = Plan {
            run_dir: config.run_dir.clone(),
            last_step: config.max_steps,
            evaluation_steps: evaluation.every_steps.filter(|_| !held_out.is_empty()),
            checkpoint: config.checkpoint.clone(),
            trackers: config.trackers.clone(),
        };
        let shown = Arc::clone(&progress);
        let folder = RunFolder::open(plan, &identity, &mut trainer, start, shown)?;
        Ok(Self {
            config,
            evaluation,
            pretrained,
            held_out,
            trainer,
            folder,
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
        let done = match self.folder.due(step) {
            Due::Evaluation => self.evaluate(step),
            Due::Checkpoint => {
                let path = self.folder.save(&self.trainer, &self.pretrained)?;
                return Ok(Progress::Saved(path));
            }
            Due::End => {
                self.folder.write_plot()?;
                self.trainer.finish()?;
                self.folder.finish_trackers();
                return Ok(Progress::Finished);
            }
            Due::Step => self.step(),
        };
        match done {
            Err(error) if error.is::<Interrupted>() => {
                self.folder.save_unsaved(&self.trainer, &self.pretrained)?;
                Ok(Progress::Interrupted)
            }
            Err(error) if error.is::<BudgetExhausted>() && self.trainer.ranks().is_alone() => {
                self.folder.save_unsaved(&self.trainer, &self.pretrained)?;
                Err(error)
            }
            done => done.map_err(|error| not_finite_first(error, &self.trainer)),
        }
    }

    fn step(&mut self) -> Result<Progress> {
        let metrics = self.trainer.step()?;
        let log = &self.config.rollout_log;
        if let Some(dir) = self.folder.dir()
            && log.is_due(metrics.step)
        {
            dir.append_rollouts(&self.trainer.rollouts(log)?)?;
        }
        self.folder.append_step(&metrics)?;
        Ok(Progress::Step(Box::new(metrics)))
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
        let append = |dir: &mut RunDir| dir.append_evaluation(step, &evaluation, &metrics);
        self.folder
            .append_evaluation(step, &metrics, &self.trainer, append)?;
        Ok(Progress::Evaluated { step, metrics })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the folder of the run.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the folder of the replaced run until this run has a checkpoint.
    pub fn replaced(&self) -> Option<&Path> {
        self.folder.replaced()
    }

    /// The trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// The metrics of all steps, those before a resume included.
    pub fn metrics(&self) -> &[StepMetrics] {
        self.folder.metrics()
    }
}

/// The error of a step. Weights that are not finite show in logits first.
pub(super) fn not_finite_first(error: anyhow::Error, trainer: &impl RunTrainer) -> anyhow::Error {
    match trainer.ensure_finite() {
        Err(weights) => weights.context(format!("{error:#}")),
        Ok(()) => error,
    }
}
