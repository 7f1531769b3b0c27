//! The settings of the demo.

use std::fmt;
use std::ops::RangeInclusive;

use candle_grpo_core::selection::DifficultyPools;
use candle_grpo_loss::{Aggregation, Clip, KlLoss, PolicyLoss, Recipe, Surrogate};
use candle_grpo_nn::{AdamWConfig, DecoderConfig};
use candle_grpo_train::learn::{LearningRateSchedule, OldLogProbs};
use candle_grpo_train::sft::{SftConfig, SftSchedule};
use candle_grpo_train::{SamplingConfig, TrainConfig};
use serde::Serialize;

use crate::task::{END, VOCABULARY};

/// All settings; the run folder contains them.
#[derive(Serialize)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) steps: usize,
    pub(crate) goal: Goal,
    pub(crate) model: DecoderConfig,
    /// The standard deviation of the initial weights.
    pub(crate) initial_std: f64,
    pub(crate) warm_up: SftConfig,
    /// The greedy held-out accuracy that ends the warm-up, and its upper limit.
    pub(crate) warm_up_accuracy: RangeInclusive<f64>,
    pub(crate) train: TrainConfig,
    /// The pools by which problems are drawn, in place of a random order.
    pub(crate) curriculum: Option<DifficultyPools>,
    /// Steps between evaluations. Absent: before and after the training only.
    pub(crate) evaluate_every: Option<usize>,
}

/// The size of the policy.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) hidden_size: usize,
    pub(crate) num_hidden_layers: usize,
}

impl Default for Size {
    fn default() -> Self {
        Self {
            hidden_size: 32,
            num_hidden_layers: 2,
        }
    }
}

/// The criterion for success.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Goal {
    /// A share of correct held-out answers.
    Accuracy(f64),
    /// An increase of that share.
    Rise(f64),
}

impl Goal {
    /// The accuracy to reach.
    pub(crate) fn accuracy(self, before: f64) -> f64 {
        match self {
            Self::Accuracy(accuracy) => accuracy,
            Self::Rise(rise) => before + rise,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Accuracy(accuracy) => write!(f, "must become at least {accuracy}"),
            Self::Rise(rise) => write!(f, "must rise by at least {rise}"),
        }
    }
}

impl Settings {
    pub(crate) fn new(seed: u64, steps: Option<usize>, short: bool, size: Size) -> Self {
        let (default_steps, goal) = if short {
            (200, Goal::Rise(0.1))
        } else {
            (1400, Goal::Accuracy(0.8))
        };
        let steps = steps.unwrap_or(default_steps);
        let width = size.hidden_size as f64 / Size::default().hidden_size as f64;
        Self {
            seed,
            steps,
            goal,
            model: DecoderConfig {
                vocab_size: VOCABULARY,
                hidden_size: size.hidden_size,
                intermediate_size: 2 * size.hidden_size,
                num_hidden_layers: size.num_hidden_layers,
                num_attention_heads: 4,
                num_key_value_heads: 2,
                max_position_embeddings: 16,
                ..DecoderConfig::default()
            },
            // About 1 / sqrt(hidden_size): 0.02, as in large models, makes narrow ones start
            // slowly.
            initial_std: 0.16 / width.sqrt(),
            warm_up: SftConfig {
                max_steps: Some(1500),
                batch_size: 128,
                optimizer: adamw(3e-3 / width),
                schedule: SftSchedule {
                    decay: None,
                    ..SftSchedule::default()
                },
                seed,
                ..SftConfig::default()
            },
            warm_up_accuracy: 0.33..=0.4,
            train: TrainConfig {
                prompts_per_step: 64,
                num_generations: 8,
                sampling: SamplingConfig {
                    max_new_tokens: 4,
                    stop_token_ids: vec![END],
                    seed,
                    ..SamplingConfig::default()
                },
                recipe: Recipe {
                    policy_loss: PolicyLoss {
                        surrogate: Surrogate::Clip(Clip::symmetric(0.2)),
                        kl: Some(KlLoss::k3(0.001)),
                        aggregation: Aggregation::TokenMean,
                        ..PolicyLoss::default()
                    },
                    ..Recipe::grpo()
                },
                old_log_probs: OldLogProbs::Sampler,
                // Two updates per batch, so that the second is off-policy and the clip takes
                // effect.
                mini_batch_size: Some(256),
                // Tensors that stay in the cache, below the size at which Candle uses threads.
                micro_batch_size: 64,
                optimizer: adamw(1.5e-3 / width),
                schedule: LearningRateSchedule {
                    warmup_steps: (steps / 10).min(50),
                    decay_until: Some(steps),
                    ..LearningRateSchedule::default()
                },
                ..TrainConfig::default()
            },
            curriculum: None,
            evaluate_every: None,
        }
    }
}

fn adamw(learning_rate: f64) -> AdamWConfig {
    AdamWConfig {
        learning_rate,
        beta2: 0.99,
        weight_decay: 0.,
        ..AdamWConfig::default()
    }
}
