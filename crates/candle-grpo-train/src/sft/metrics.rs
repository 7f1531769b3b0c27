//! Supervised training metrics.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::json_lines::number;
use crate::learn::LikelihoodSums;
use crate::step_record::StepRecord;

/// Metrics for one step of supervised training: a line in `metrics.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SftMetrics {
    /// Step number, starting at 1.
    pub step: usize,
    /// Passes over the rows so far.
    pub epoch: f64,
    /// Loss before the update: the weighted mean negative log-prob of the tokens that train, in
    /// nats per token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Fraction of these tokens to which the model gives the highest probability.
    #[serde(deserialize_with = "number")]
    pub token_accuracy: f64,
    /// The model's mean entropy at these tokens, in nats.
    #[serde(deserialize_with = "number")]
    pub entropy: f64,
    /// Load-balancing loss, for a model with experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f64>,
    /// Gradient norm before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// Number of rows in the step.
    pub rows: usize,
    /// Number of tokens in these rows.
    pub tokens: usize,
    /// Number of these tokens that train.
    pub trained_tokens: usize,
    /// Number of tokens that have trained since the start of the run.
    pub total_trained_tokens: usize,
    /// Number of backward passes, across all ranks.
    pub micro_batches: usize,
    /// Row tokens per second.
    #[serde(deserialize_with = "number")]
    pub tokens_per_second: f64,
    /// The step's time.
    pub seconds: SftSeconds,
}

/// The time for a step of supervised training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SftSeconds {
    /// Passes and update, in seconds.
    pub train: f64,
}

impl StepRecord for SftMetrics {
    fn step(&self) -> usize {
        self.step
    }
}

impl LikelihoodSums {
    /// Returns an evaluation's metrics: `loss`, `perplexity` (its exponential) and
    /// `token_accuracy`.
    pub fn evaluation(&self) -> BTreeMap<String, f64> {
        let metrics = [
            ("loss", self.mean_loss()),
            ("perplexity", self.mean_loss().exp()),
            ("token_accuracy", self.token_accuracy()),
        ];
        // JSON cannot represent infinity.
        let metrics = metrics.into_iter().filter(|(_, value)| value.is_finite());
        metrics.map(|(name, x)| (name.to_owned(), x)).collect()
    }
}
