//! The metrics of supervised training.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::json_lines::number;
use crate::learn::LikelihoodSums;
use crate::step_record::StepRecord;

/// The metrics of one step of supervised training: one line of `metrics.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SftMetrics {
    /// The number of the step, from 1.
    pub step: usize,
    /// The passes over the rows so far.
    pub epoch: f64,
    /// The loss before the update: the weighted mean of the negative log-probs of the tokens that
    /// train, in nats per token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// The share of these tokens to which the model gives the highest probability.
    #[serde(deserialize_with = "number")]
    pub token_accuracy: f64,
    /// The mean entropy of the model at these tokens, in nats.
    #[serde(deserialize_with = "number")]
    pub entropy: f64,
    /// The load-balancing loss of a model with experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f64>,
    /// The norm of the gradients before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// The number of rows of the step.
    pub rows: usize,
    /// The number of tokens of these rows.
    pub tokens: usize,
    /// The number of those that train.
    pub trained_tokens: usize,
    /// The number of tokens that have trained since the beginning of the run.
    pub total_trained_tokens: usize,
    /// The number of backward passes, of all ranks.
    pub micro_batches: usize,
    /// Tokens of the rows per second.
    #[serde(deserialize_with = "number")]
    pub tokens_per_second: f64,
    /// The time of the step.
    pub seconds: SftSeconds,
}

/// The time of a step of supervised training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SftSeconds {
    /// Passes and the update, in seconds.
    pub train: f64,
}

impl StepRecord for SftMetrics {
    fn step(&self) -> usize {
        self.step
    }
}

impl LikelihoodSums {
    /// Returns the metrics of an evaluation: `loss`, `perplexity` (its exponential) and
    /// `token_accuracy`.
    pub fn evaluation(&self) -> BTreeMap<String, f64> {
        let metrics = [
            ("loss", self.mean_loss()),
            ("perplexity", self.mean_loss().exp()),
            ("token_accuracy", self.token_accuracy()),
        ];
        // JSON has no number for infinity.
        let metrics = metrics.into_iter().filter(|(_, value)| value.is_finite());
        metrics.map(|(name, x)| (name.to_owned(), x)).collect()
    }
}
