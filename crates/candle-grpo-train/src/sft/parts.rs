//! A supervised trainer's parts.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_nn::{DecoderConfig, Parameters};

use super::{SftConfig, SftTrainer};
use crate::data::MixedOrder;
use crate::learn::Ranks;
use crate::learn::models::{Models, new_actor};
use crate::{Progress, Sequence};
use candle_grpo_base::progress::NoProgress;
use candle_grpo_base::within;

/// An [`SftTrainer`]'s parts. [`Self::new`] takes the parts that every run has, and sets the others
/// to their defaults.
pub struct SftParts {
    /// The policy's shape.
    pub model: DecoderConfig,
    /// The weights that it starts from.
    pub parameters: Parameters,
    /// The examples to train on, at least one.
    pub examples: Vec<Sequence>,
    /// The settings.
    pub config: SftConfig,
    /// The examples' order; absent: a random order over all.
    pub order: Option<MixedOrder>,
    /// The receiver of progress, which can also cancel steps.
    pub progress: Arc<dyn Progress>,
    /// The ranks that share the passes in every step and evaluation. All ranks' trainers must have
    /// the same parts, and call the same methods in the same order. Losses and weights equal those
    /// with one rank up to rounding in sums.
    pub collective: Arc<dyn Collective>,
    /// The digest of the initial weights, see
    /// [`TrainerParts::parameters_sha256`](crate::TrainerParts::parameters_sha256).
    pub parameters_sha256: Option<String>,
}

impl SftParts {
    /// Creates the parts for a run in one process.
    pub fn new(
        model: DecoderConfig,
        parameters: Parameters,
        examples: Vec<Sequence>,
        config: SftConfig,
    ) -> Self {
        Self {
            model,
            parameters,
            examples,
            config,
            order: None,
            progress: Arc::new(NoProgress),
            collective: Arc::new(Alone),
            parameters_sha256: None,
        }
    }
}

impl SftTrainer {
    /// Creates a trainer.
    ///
    /// # Errors
    ///
    /// Fails if there are no examples, the settings are invalid, the order has a different number
    /// of rows, or the optimizer state cannot be allocated.
    pub fn new(parts: SftParts) -> Result<Self> {
        let (config, examples) = (parts.config, parts.examples);
        config.validate()?;
        ensure!(!examples.is_empty(), "examples: none, must be at least one");
        let (visits, last_step) = config.length(examples.len());
        let schedule = config.schedule.of_steps(last_step);
        let schedule = schedule.map_err(|error| within("schedule", error))?;
        let order = match parts.order {
            Some(order) => order,
            None => MixedOrder::single(examples.len(), config.seed)?,
        };
        order.ensure_rows(examples.len(), "examples")?;
        let adapters = config.adapters.clone();
        let adapters = adapters.map(|adapters| (adapters, config.base_weights));
        let (model, seed) = (parts.model, config.seed);
        let ranks = (&parts.collective, config.sharding);
        let actor = new_actor(
            &model,
            parts.parameters,
            adapters,
            seed,
            config.actor(),
            ranks,
        )?;
        let mut models = Models::of_actor(model, actor);
        if let Some(sha256) = parts.parameters_sha256 {
            models.base_sha256 = sha256.into();
        }
        let ranks = Ranks::new(parts.collective);
        Ok(Self {
            models,
            examples,
            order,
            config,
            schedule,
            visits,
            last_step,
            progress: ranks.progress_of_step(&parts.progress),
            receiver: parts.progress,
            ranks,
            state: Default::default(),
            trained_tokens: 0,
        })
    }
}
