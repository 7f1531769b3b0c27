//! The supervised training loop.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::{ComputeDType, LanguageModel, Parameters};

use super::{SftConfig, SftMetrics, SftSeconds};
use crate::data::MixedOrder;
use crate::learn::micro_batches::{Divided, MicroBatchSize, MicroBatches};
use crate::learn::models::{Models, ensure_not_canceled};
use crate::learn::{LearningRateSchedule, LikelihoodSums, Ranks};
use crate::run::TrainerState;
use crate::sequence::Batch;
use crate::{Actor, Pretrained, Progress, Sequence};
use candle_grpo_base::progress::Phase;

/// Trains a policy on examples. Each step maximizes the weighted mean likelihood of the tokens in a
/// batch of rows.
///
/// ```
/// use candle_core::Device;
/// use candle_grpo_nn::{DecoderConfig, Parameters};
/// use candle_grpo_train::Sequence;
/// use candle_grpo_train::sft::{SftConfig, SftParts, SftTrainer};
///
/// # fn main() -> anyhow::Result<()> {
/// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let parameters = Parameters::init(&model, 7, &Device::Cpu)?;
/// let examples = vec![Sequence::of_answer(&[1, 2], &[3, 0])?, Sequence::of_answer(&[4], &[5, 0])?];
/// let mut config = SftConfig { max_steps: Some(200), batch_size: 2, ..SftConfig::default() };
/// config.optimizer.learning_rate = 1e-2;
/// let mut trainer = SftTrainer::new(SftParts::new(model, parameters, examples, config))?;
/// let first = trainer.step()?.loss;
/// while trainer.steps() < trainer.last_step() {
///     trainer.step()?;
/// }
/// assert!(trainer.step().is_err()); // the run is over
/// assert!(trainer.actor().likelihood(&[Sequence::of_answer(&[1, 2], &[3, 0])?])?.mean_loss() < first / 2.);
/// # Ok(())
/// # }
/// ```
pub struct SftTrainer {
    pub(super) models: Models,
    pub(super) examples: Vec<Sequence>,
    pub(super) order: MixedOrder,
    pub(super) config: SftConfig,
    pub(super) schedule: LearningRateSchedule,
    /// Number of rows that the run visits, and its last step.
    pub(super) visits: usize,
    pub(super) last_step: usize,
    pub(super) ranks: Ranks,
    /// Receives progress.
    pub(super) receiver: Arc<dyn Progress>,
    /// Progress for work within a step. With several ranks, none can cancel alone.
    pub(super) progress: Arc<dyn Progress>,
    pub(super) state: TrainerState,
    /// Number of tokens that have trained.
    pub(super) trained_tokens: usize,
}

impl SftTrainer {
    /// Runs one step: the passes over its rows, and an update.
    ///
    /// # Errors
    ///
    /// After the last step. [`Interrupted`](crate::Interrupted) if the progress cancels, and
    /// [`NotFinite`](crate::NotFinite) if the loss or a gradient is NaN or infinite. In these cases
    /// the trainer is unchanged.
    pub fn step(&mut self) -> Result<SftMetrics> {
        let step = self.state.steps + 1;
        let result = self.try_step(step);
        if result.is_err() {
            self.models.zero_grad();
        }
        result.with_context(|| format!("step {step}"))
    }

    fn try_step(&mut self, step: usize) -> Result<SftMetrics> {
        ensure!(
            step <= self.last_step,
            "the run is over after {} steps",
            self.last_step
        );
        self.ensure_not_canceled()?;
        let start = Instant::now();
        let visited = self.state.visited;
        let count = self.config.batch_size.min(self.visits - visited);
        let rows = Batch::new(self.order.pick(&self.examples, visited, count))?;
        let divided = self.begin(Phase::Learn, &rows)?;
        let passes = passes(&self.config, &self.ranks, &*self.progress);
        let actor = &mut self.models.actor;
        let factor = self.schedule.factor(step);
        actor.set_learning_rate(self.config.optimizer.learning_rate * factor);
        let likelihood = Likelihood::default();
        let sums = passes.accumulate_likelihood(actor, (&rows, &divided), likelihood, 1.)?;
        let stats = actor.clip_grad_and_step(self.config.max_grad_norm)?;
        let sums = LikelihoodSums::over_ranks(sums, &self.ranks)?;
        let rows = rows.sequences();
        let (num_rows, tokens) = (rows.len(), rows.iter().map(|row| row.tokens().len()).sum());
        self.state.steps = step;
        self.state.visited += num_rows;
        self.trained_tokens += sums.tokens as usize;
        let seconds = start.elapsed().as_secs_f64();
        Ok(SftMetrics {
            step,
            epoch: self.state.visited as f64 / self.examples.len() as f64,
            loss: sums.mean_loss(),
            token_accuracy: sums.token_accuracy(),
            entropy: sums.mean_entropy(),
            router_aux_loss: (sums.read_tokens > 0.)
                .then(|| sums.router_aux_loss / sums.read_tokens),
            grad_norm: stats.grad_norm,
            learning_rate: stats.learning_rate,
            rows: num_rows,
            tokens,
            trained_tokens: sums.tokens as usize,
            total_trained_tokens: self.trained_tokens,
            micro_batches: divided.count,
            tokens_per_second: tokens as f64 / seconds,
            seconds: SftSeconds { train: seconds },
        })
    }

    /// Returns the sums over `examples` with the current weights, for
    /// [`LikelihoodSums::evaluation`].
    ///
    /// # Errors
    ///
    /// [`Interrupted`](crate::Interrupted) if the progress cancels, and
    /// [`NotFinite`](crate::NotFinite) if the loss is NaN or infinite.
    pub fn evaluate(&self, examples: &[Sequence]) -> Result<LikelihoodSums> {
        ensure!(!examples.is_empty(), "examples: none, must be at least one");
        self.ensure_not_canceled()?;
        let divided = self.begin(Phase::HeldOutLoss, &Batch::new(examples.to_vec())?)?;
        let sums = divided.own.iter().map(|part| {
            ensure_not_canceled(&*self.progress)?;
            let part = part.sequences();
            let sums = self.models.actor.likelihood(part)?;
            self.progress.advance(part.len(), sums.tokens as usize);
            Ok(sums)
        });
        let sums = sums.collect::<Result<Vec<_>>>()?;
        if self.models.actor.policy().divided().is_some() {
            for _ in sums.len()..divided.most_of_rank {
                // Takes part in the passes of the others.
                self.models.actor.likelihood(&examples[..1])?;
            }
        }
        LikelihoodSums::over_ranks(sums, &self.ranks)
    }

    /// Begins the passes over `rows`, and returns the micro-batches.
    fn begin(&self, phase: Phase, rows: &Batch) -> Result<Divided<Batch>> {
        let passes = passes(&self.config, &self.ranks, &*self.progress);
        let divided = passes.divide(rows)?;
        let units = divided.own.iter().map(|part| part.sequences().len());
        self.progress.begin(phase, units.sum());
        Ok(divided)
    }

    /// Fails with [`Interrupted`](crate::Interrupted) if any rank's progress cancels. All ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// Also if another rank has ended.
    pub fn ensure_not_canceled(&self) -> Result<()> {
        self.ranks.ensure_not_canceled(&*self.receiver)
    }

    /// Checks that all ranks have bit-identical weights. All ranks must call it.
    ///
    /// # Errors
    ///
    /// If a rank differs from rank 0.
    pub fn ensure_equal_ranks(&self) -> Result<()> {
        self.models.ensure_equal(&self.ranks, self.state.steps)
    }

    /// Checks the weights that train.
    ///
    /// # Errors
    ///
    /// [`NotFinite`](crate::NotFinite) if one is NaN or infinite.
    pub fn ensure_finite(&self) -> Result<()> {
        self.models.ensure_finite()
    }

    /// Writes a checkpoint to an existing folder: the model in `dtype` as in [`Pretrained::save`],
    /// with merged adapters, and the run's state, with the adapters alone in `adapter/`.
    ///
    /// # Errors
    ///
    /// [`NotFinite`](crate::NotFinite), before anything is written, if a weight is NaN or infinite.
    pub fn write_checkpoint(
        &self,
        folder: &Path,
        model: &Pretrained,
        dtype: ComputeDType,
    ) -> Result<()> {
        self.models.write_policy(folder, model, dtype)?;
        self.models.save(folder, &self.state, &[])
    }

    /// Supports [`Self::write_checkpoint`] on rank 0. If the ranks divide anything
    /// ([`SftConfig::sharding`]), all others must call it at the same time.
    pub fn take_part_in_checkpoint(&self) -> Result<()> {
        self.models.take_part_in_save()
    }

    /// Resumes from a checkpoint. On the CPU, subsequent steps are bit-identical to an
    /// uninterrupted run with the same model, examples and settings.
    ///
    /// # Errors
    ///
    /// If the shape, the adapters or the initial weights under adapters differ. Do not use the
    /// trainer after an error.
    pub fn load_state(&mut self, folder: &Path) -> Result<()> {
        self.state = self.models.load(folder, &self.state, &[])?;
        let visited = self.order.pick(&self.examples, 0, self.state.visited);
        self.trained_tokens = visited.iter().map(|row| row.num_trained_tokens()).sum();
        Ok(())
    }

    /// The policy.
    pub fn actor(&self) -> &Actor {
        &self.models.actor
    }

    /// Returns the current policy parameters, with any adapters merged. Without adapters they are
    /// shared with the policy. If ranks [divide](candle_grpo_nn::AdamWConfig::divide) the f32
    /// weights, these are rounded; a checkpoint has the f32 weights. If they divide all weights,
    /// read them with [`Parameters::whole`], and [hold](Actor::hold_weights) them to merge
    /// adapters.
    pub fn policy_parameters(&self) -> Result<Parameters> {
        self.models.weights(0).merged()
    }

    /// The ranks that share the steps.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Number of steps so far.
    pub fn steps(&self) -> usize {
        self.state.steps
    }

    /// Number of steps in the whole run.
    pub fn last_step(&self) -> usize {
        self.last_step
    }
}

/// The passes in a step or evaluation.
fn passes<'a>(
    config: &SftConfig,
    ranks: &'a Ranks,
    progress: &'a dyn Progress,
) -> MicroBatches<'a> {
    MicroBatches {
        size: MicroBatchSize::TokensOfRows(config.micro_batch_tokens),
        progress,
        receiver: progress,
        ranks,
        gathers: false,
    }
}
