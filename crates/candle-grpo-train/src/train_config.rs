//! The settings of a training run.

use anyhow::{Result, ensure};
use candle_grpo_core::{GroupAdvantage, Scale, SingleSample};
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::AdamWConfig;
use serde::{Deserialize, Serialize};

use crate::actor::ensure_can_be_fed;
use crate::{ActorConfig, LearningRateSchedule, SamplingConfig};

/// Where the log-probs that the ratio of an update refers to come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// A forward pass of the policy before the first update of the step: right for any sampler.
    #[default]
    Recompute,
    /// What the sampler recorded while it drew: saves the pass. Here they differ by rounding only.
    Sampler,
}

/// The settings of a training run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Prompts in a step.
    ///
    /// Where the data set begins anew, or is smaller than this, a prompt may occur more than once in a step. Each
    /// occurrence then has completions, and a group, of its own.
    pub prompts_per_step: usize,
    /// Completions of each prompt: its group.
    pub num_generations: usize,
    /// How completions are drawn. Its seed decides the order of the prompts too.
    pub sampling: SamplingConfig,
    /// How rewards become advantages.
    pub advantage: GroupAdvantage,
    /// What advantages are divided by.
    pub scale: Scale,
    /// What is minimised. With a KL loss the policy at the start of the run is kept as the reference.
    pub policy_loss: PolicyLoss,
    /// Where the log-probs that the ratio refers to come from.
    pub old_log_probs: OldLogProbs,
    /// How often a step goes through its completions.
    pub epochs: usize,
    /// Completions for each optimiser step; absent: all of the step.
    pub mini_batch_size: Option<usize>,
    /// Completions for each backward pass. It bounds the memory and does not change the update.
    pub micro_batch_size: usize,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// How the learning rate changes.
    pub schedule: LearningRateSchedule,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            prompts_per_step: 32,
            num_generations: 8,
            sampling: SamplingConfig::default(),
            advantage: GroupAdvantage::grpo(),
            scale: Scale::Group,
            policy_loss: PolicyLoss::grpo(),
            old_log_probs: OldLogProbs::default(),
            epochs: 1,
            mini_batch_size: None,
            micro_batch_size: 32,
            optimizer: AdamWConfig {
                learning_rate: 1e-6,
                ..AdamWConfig::default()
            },
            schedule: LearningRateSchedule::default(),
            max_grad_norm: 1.,
        }
    }
}

impl TrainConfig {
    /// Errs if a field has a value with which no step can be made.
    ///
    /// [`Trainer::new`](crate::Trainer::new) asks this; ask it earlier if there is work to do before.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("prompts_per_step", self.prompts_per_step),
            ("num_generations", self.num_generations),
            ("epochs", self.epochs),
            ("mini_batch_size", self.mini_batch_size.unwrap_or(1)),
            ("micro_batch_size", self.micro_batch_size),
        ] {
            ensure!(value > 0, "{name}: 0, must be at least 1");
        }
        ensure!(
            self.num_generations > 1 || self.advantage.single_sample != SingleSample::Error,
            "num_generations: 1, a relative advantage needs at least 2 (or choose an advantage.single_sample policy)"
        );
        ensure!(
            self.max_grad_norm > 0.,
            "max_grad_norm: {}, must be above 0",
            self.max_grad_norm
        );
        ensure!(
            !self.sampling.greedy,
            "sampling.greedy: true, must be false in training: all completions of a group would be the same"
        );
        ensure_can_be_fed(&self.policy_loss)?;
        self.schedule.validate()?;
        self.sampling.validate()
    }

    pub(crate) fn actor(&self) -> ActorConfig {
        ActorConfig {
            policy_loss: self.policy_loss.clone(),
            optimizer: self.optimizer.clone(),
            temperature: self.sampling.temperature,
        }
    }
}
