//! A supervised run from its first step to its last.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_train::learn::{Example, Ranks};
use candle_grpo_train::run::RunInputs;
use candle_grpo_train::sft::{SftDataset, SftMetrics, SftTrainer};
use candle_grpo_train::{ComputeDType, Interrupted, Pretrained, RunDir};

use super::folder::{Due, Plan, RunFolder, Start};
use super::resume::{Identity, RunTrainer};
use super::session::{Progress, not_finite_first};
use crate::config::{Configuration, SftRunConfig};

/// A supervised run of a configuration: steps, evaluations and checkpoints.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use candle_grpo::config::SftRunConfig;
/// use candle_grpo::run::{Progress, SftSession, Start, load_policy};
/// use candle_grpo::train::progress::NoProgress;
///
/// let config = SftRunConfig::read(Path::new("sft.yaml"))?;
/// let pretrained = load_policy(&config)?;
/// let dataset = config.load_data(&pretrained)?;
/// let progress = Arc::new(NoProgress);
/// let mut session = SftSession::new(config, pretrained, dataset, Start::New, progress)?;
/// loop {
///     match session.advance()? {
///         Progress::Step(metrics) => println!("step {}: {:.3}", metrics.step, metrics.loss),
///         Progress::Finished => break,
///         _ => {}
///     }
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct SftSession {
    config: SftRunConfig,
    pretrained: Pretrained,
    /// The rows of an evaluation.
    held_out: Vec<Example>,
    trainer: SftTrainer,
    folder: RunFolder<SftMetrics>,
}

impl RunTrainer for SftTrainer {
    type Record = SftMetrics;
    /// The number of steps decides the learning rate of each, so it may not change.
    const MAY_CHANGE: &'static [&'static str] = &[
        "checkpoint.dtype",
        "model",
        "run_dir",
        "threads",
        "trackers",
    ];

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

impl SftSession {
    /// Creates the trainer and the folder, and loads the last checkpoint of a resumed run. The
    /// weights of `pretrained` are trained in place. [`SftRunConfig::threads`] is not applied here.
    ///
    /// # Errors
    ///
    /// Returns an error, before the folder changes, if the settings, the rows and the model do not
    /// fit, or if the folder cannot be begun, replaced or resumed.
    pub fn new(
        config: SftRunConfig,
        pretrained: Pretrained,
        dataset: SftDataset,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
    ) -> Result<Self> {
        Self::on_ranks(
            config,
            pretrained,
            dataset,
            start,
            progress,
            Arc::new(Alone),
        )
    }

    /// [`Self::new`] for one of several ranks that share the run. All ranks must call it with the
    /// same arguments, and then [`Self::advance`] as often.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`]. A rank that fails must end the job, with [`Collective::abort`]: the
    /// others wait for it.
    pub fn on_ranks(
        config: SftRunConfig,
        pretrained: Pretrained,
        dataset: SftDataset,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        collective: Arc<dyn Collective>,
    ) -> Result<Self> {
        let SftDataset {
            train,
            held_out,
            order,
            ..
        } = dataset;
        let inputs = RunInputs::of_rows(&pretrained, &train.digests, &held_out.digests, &[])?
            .with_hub_commits(config.hub_commits().clone());
        let (model, parameters) = (pretrained.model.clone(), pretrained.parameters.clone());
        let mut trainer = SftTrainer::new(model, parameters, train.examples, config.sft.clone())?
            .with_order(order)?
            .with_collective(collective)?
            .with_progress(Arc::clone(&progress))
            .with_inputs(&inputs);
        let mut held_out = held_out.examples;
        held_out.truncate(config.evaluation.max_rows.unwrap_or(usize::MAX));
        let identity = Identity {
            settings: config.to_value()?,
            inputs,
            train: train.digests,
        };
        let evaluation_steps = config.evaluation.every_steps;
        let plan = Plan {
            run_dir: config.run_dir.clone(),
            last_step: trainer.last_step(),
            evaluation_steps: evaluation_steps.filter(|_| !held_out.is_empty()),
            checkpoint: config.checkpoint.clone(),
            trackers: config.trackers.clone(),
        };
        let folder = RunFolder::open(plan, &identity, &mut trainer, start, progress)?;
        Ok(Self {
            config,
            pretrained,
            held_out,
            trainer,
            folder,
        })
    }

    /// Performs the next evaluation, checkpoint or step.
    ///
    /// # Errors
    ///
    /// With [`NotFinite`](candle_grpo_train::NotFinite) and the name of the tensor if a loss, a
    /// gradient or a weight is not finite. After any error, or if the program is killed, the run
    /// can be resumed from its last checkpoint.
    pub fn advance(&mut self) -> Result<Progress<SftMetrics>> {
        let step = self.trainer.steps();
        let done = match self.folder.due(step) {
            Due::Evaluation => self.evaluate(step),
            Due::Checkpoint => {
                let path = self.folder.save(&self.trainer, &self.pretrained)?;
                return Ok(Progress::Saved(path));
            }
            Due::End => {
                self.folder.write_plot()?;
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
            done => done.map_err(|error| not_finite_first(error, &self.trainer)),
        }
    }

    fn step(&mut self) -> Result<Progress<SftMetrics>> {
        let metrics = self.trainer.step()?;
        self.folder.append_step(&metrics)?;
        Ok(Progress::Step(Box::new(metrics)))
    }

    fn evaluate(&mut self, step: usize) -> Result<Progress<SftMetrics>> {
        let metrics = self.trainer.evaluate(&self.held_out)?.evaluation();
        let append = |dir: &mut RunDir| dir.append_evaluation_metrics(step, &metrics);
        self.folder
            .append_evaluation(step, &metrics, &self.trainer, append)?;
        Ok(Progress::Evaluated { step, metrics })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &SftRunConfig {
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
    pub fn trainer(&self) -> &SftTrainer {
        &self.trainer
    }

    /// The metrics of all steps, those before a resume included.
    pub fn metrics(&self) -> &[SftMetrics] {
        self.folder.metrics()
    }
}
