//! A run from its first step to its last.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_train::rewards::BudgetExhausted;
use candle_grpo_train::run::prompt_digest;
use candle_grpo_train::{
    Generator, Pretrained, Prompt, RewardFunction, RunDir, SamplingConfig, StepMetrics, Trainer,
    TrainerParts,
};

use super::engine::engine;
use super::evaluation::evaluate_policy;
use super::folder::{Plan, RunFolder, Start};
use super::prompts::RunPrompts;
use super::resume::Identity;
use super::run_session::{Actions, Run};
use super::teacher::load_teacher;
use super::trajectories::trajectories;
use crate::config::{EvaluationConfig, RunConfig};

/// A configured run: steps, evaluations and checkpoints.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use candle_grpo::config::RunConfig;
/// use candle_grpo::run::{Progress, RunPrompts, RunSession, Session, Start, load_policy};
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
    /// The evaluation section, with the model's stop tokens.
    evaluation: EvaluationConfig,
    held_out: Vec<Prompt>,
    run: Run<Trainer>,
    progress: Arc<dyn candle_grpo_train::Progress>,
}

impl Session {
    /// Creates the trainer and the run directory, and loads a resumed run's last checkpoint. The
    /// weights in `pretrained` are trained in place. Under adapters they do not train, and are
    /// converted to the run's compute dtype. [`RunConfig::threads`] is not applied here.
    ///
    /// # Errors
    ///
    /// Returns an error, before the directory changes, if the settings, prompts and model do not
    /// fit together, or if the run directory cannot be created, replaced or resumed.
    pub fn new(
        config: RunConfig,
        pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
    ) -> Result<Self> {
        let alone = (None, Arc::new(Alone) as _);
        Self::build(config, pretrained, prompts, reward, start, progress, alone)
    }

    /// Creates a session that samples all completions, for steps and evaluations, from `generator`
    /// instead of the policy in this process. The generator receives the weights before the first
    /// completion and after each update.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn with_generator(
        config: RunConfig,
        pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        generator: Arc<dyn Generator>,
    ) -> Result<Self> {
        let alone = (Some(generator), Arc::new(Alone) as _);
        Self::build(config, pretrained, prompts, reward, start, progress, alone)
    }

    /// Creates a session on one of several ranks that share the run. All ranks must call it with
    /// the same arguments, and then call [`RunSession::advance`](super::RunSession::advance)
    /// equally often. Rank 0 writes the run directory; the others read its checkpoints on resume.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`]. If a rank fails, it must end the job with [`Collective::abort`],
    /// because the others wait for it.
    pub fn on_ranks(
        config: RunConfig,
        pretrained: Pretrained,
        prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        collective: Arc<dyn Collective>,
    ) -> Result<Self> {
        let ranks = (None, collective);
        Self::build(config, pretrained, prompts, reward, start, progress, ranks)
    }

    fn build(
        config: RunConfig,
        mut pretrained: Pretrained,
        mut prompts: RunPrompts,
        reward: impl RewardFunction + 'static,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        (generator, collective): (Option<Arc<dyn Generator>>, Arc<dyn Collective>),
    ) -> Result<Self> {
        let longest = prompts.longest_row(&config);
        pretrained.chat_template = config.chat_template(&pretrained)?;
        pretrained.model = pretrained.model.for_rows_of(longest);
        if !pretrained.parameters.is_divided() {
            let (base, dtype) = config.train.stored_form();
            let model = &pretrained.model;
            pretrained.parameters = (pretrained.parameters).frozen_as(model, base, dtype.into())?;
        }
        let sampling = |sampling: &SamplingConfig| pretrained.sampling(sampling.clone());
        let evaluation = EvaluationConfig {
            sampler: sampling(&config.evaluation.sampler),
            ..config.evaluation.clone()
        };
        let mut settings = config.train.clone();
        settings.sampling = sampling(&settings.sampling);
        config.check_model(&pretrained.model, &prompts.train, &prompts.held_out)?;
        config.check_training()?;
        let engine = engine(
            &settings,
            &settings.sampling,
            &pretrained,
            &RunDir::engine_weights(&config.run_dir),
            &prompts.train,
            true,
        )?;
        let generator = generator.or(engine);
        let inputs = prompts.inputs(&config, &pretrained)?;
        let environment = config.environment.as_ref();
        let stop_token_ids = settings.sampling.stop_token_ids.clone();
        let environments = environment
            .map(|config| trajectories(config, &pretrained, &stop_token_ids))
            .transpose()?;
        let teacher = load_teacher(
            &config,
            &settings.sampling,
            &prompts.train,
            longest,
            &pretrained,
            &collective,
        )?;
        let held_out = mem::take(&mut prompts.held_out);
        let mut trainer = Trainer::new(TrainerParts {
            collective,
            progress: Arc::clone(&progress),
            last_step: config.max_steps,
            parameters_sha256: inputs.parameters_sha256().map(str::to_owned),
            teacher: teacher.part,
            generator,
            environments,
            ..prompts.into_parts(
                &config,
                &mut pretrained,
                reward,
                settings,
                teacher.generator,
            )
        })?;
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
            held_out,
            run: Run {
                trainer,
                pretrained,
                folder,
            },
            progress,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.run.trainer
    }
}

impl Actions for Session {
    type Trainer = Trainer;

    fn run(&self) -> &Run<Trainer> {
        &self.run
    }

    fn run_mut(&mut self) -> &mut Run<Trainer> {
        &mut self.run
    }

    fn step(&mut self) -> Result<StepMetrics> {
        let Run {
            trainer, folder, ..
        } = &mut self.run;
        let (alarms, before) = (&self.config.alarms, folder.metrics());
        let warn = |text: String| tracing::warn!("{text}");
        let mut metrics = alarms.watch(before, warn, || trainer.step())?;
        metrics.alarms = alarms.check(before, &metrics);
        alarms.warnings(before, &metrics).into_iter().for_each(warn);
        let log = &self.config.rollout_log;
        if let Some(dir) = folder.dir()
            && log.is_due(metrics.step)
        {
            dir.append_rollouts(&trainer.rollouts(log)?)?;
        }
        Ok(metrics)
    }

    fn evaluate(&mut self, step: usize) -> Result<BTreeMap<String, f64>> {
        let Run {
            trainer, folder, ..
        } = &mut self.run;
        trainer.ensure_not_canceled()?;
        let config = &self.evaluation;
        let evaluation = evaluate_policy(
            &trainer.sampler(config.sampler.clone())?,
            &self.held_out,
            trainer.reward(),
            trainer.tokenizer(),
            config,
            &*self.progress,
        )?;
        let metrics = evaluation.metrics(&config.pass_at, config.pass_reward)?;
        let append = |dir: &mut RunDir| dir.append_evaluation(step, &evaluation, &metrics);
        folder.append_evaluation(step, &metrics, trainer, append)?;
        Ok(metrics)
    }

    fn finish(&mut self) -> Result<()> {
        self.run.trainer.finish()
    }

    fn saves_after(&self, error: &anyhow::Error) -> bool {
        error.is::<BudgetExhausted>() && self.run.trainer.ranks().is_alone()
    }
}
