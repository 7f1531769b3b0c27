//! A supervised run from its first step to its last.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_nn::Parameters;
use candle_grpo_train::Sequence;
use candle_grpo_train::run::RunInputs;
use candle_grpo_train::sft::{SftDataset, SftMetrics, SftParts, SftTrainer};
use candle_grpo_train::{Pretrained, RunDir};

use super::folder::{Plan, RunFolder, Start};
use super::resume::Identity;
use super::run_session::{Actions, Run};
use crate::config::{Configuration, SftRunConfig};

/// A configured supervised run: steps, evaluations and checkpoints.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::Arc;
/// use candle_grpo::config::SftRunConfig;
/// use candle_grpo::run::{Progress, RunSession, SftSession, Start, load_policy};
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
    /// The held-out rows.
    held_out: Vec<Sequence>,
    run: Run<SftTrainer>,
}

impl SftSession {
    /// Creates the trainer and the run directory, and loads a resumed run's last checkpoint. The
    /// weights in `pretrained` are trained in place. [`SftRunConfig::threads`] is not applied here.
    ///
    /// # Errors
    ///
    /// Returns an error, before the directory changes, if the settings, rows and model do not fit
    /// together, or if the run directory cannot be created, replaced or resumed.
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

    /// Creates a session on one of several ranks that share the run. All ranks must call it with
    /// the same arguments, and then call [`RunSession::advance`](super::RunSession::advance)
    /// equally often.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`]. If a rank fails, it must end the job with [`Collective::abort`],
    /// because the others wait for it.
    pub fn on_ranks(
        config: SftRunConfig,
        mut pretrained: Pretrained,
        dataset: SftDataset,
        start: Start,
        progress: Arc<dyn candle_grpo_train::Progress>,
        collective: Arc<dyn Collective>,
    ) -> Result<Self> {
        pretrained.model = pretrained.model.for_rows_of(dataset.longest_row());
        let SftDataset {
            train,
            held_out,
            order,
            ..
        } = dataset;
        let inputs = RunInputs::of_rows(&pretrained, &train.digests, &held_out.digests, &[])?
            .with_hub_commits(config.hub_commits().clone());
        let model = pretrained.model.clone();
        // The trainer may free them.
        let parameters = mem::replace(&mut pretrained.parameters, Parameters::empty());
        let mut trainer = SftTrainer::new(SftParts {
            order: Some(order),
            collective,
            progress: Arc::clone(&progress),
            parameters_sha256: inputs.parameters_sha256().map(str::to_owned),
            ..SftParts::new(model, parameters, train.examples, config.sft.clone())
        })?;
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
            held_out,
            run: Run {
                trainer,
                pretrained,
                folder,
            },
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &SftRunConfig {
        &self.config
    }

    /// Returns the trainer.
    pub fn trainer(&self) -> &SftTrainer {
        &self.run.trainer
    }
}

impl Actions for SftSession {
    type Trainer = SftTrainer;

    fn run(&self) -> &Run<SftTrainer> {
        &self.run
    }

    fn run_mut(&mut self) -> &mut Run<SftTrainer> {
        &mut self.run
    }

    fn step(&mut self) -> Result<SftMetrics> {
        self.run.trainer.step()
    }

    fn evaluate(&mut self, step: usize) -> Result<BTreeMap<String, f64>> {
        let Run {
            trainer, folder, ..
        } = &mut self.run;
        let metrics = trainer.evaluate(&self.held_out)?.evaluation();
        let append = |dir: &mut RunDir| dir.append_evaluation_metrics(step, &metrics);
        folder.append_evaluation(step, &metrics, trainer, append)?;
        Ok(metrics)
    }
}
