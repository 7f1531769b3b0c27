//! The policy that a policy learns from.

use anyhow::Result;
use candle_core::Tensor;

use super::Reference;
use crate::{Progress, TokenBatch};

/// A fixed policy to learn from: a model in this process ([`Reference`]), or one on servers
/// (`ServerTeacher` in `rollout::engine`).
pub trait Teacher: Send + Sync {
    /// Returns whether a call has the sequences of one micro-batch, whose memory is bounded. By
    /// default it has; otherwise a call has all sequences of the rank.
    fn takes_micro_batches(&self) -> bool {
        true
    }

    /// Returns the log-probs of the responses of `batch` at `temperature`, f32 `[B, T]`, detached.
    /// Those of tokens that are not in the response mask are not used.
    ///
    /// # Errors
    ///
    /// If the teacher fails, and with [`Interrupted`](crate::Interrupted) if `progress` cancels.
    fn log_probs(
        &self,
        batch: &TokenBatch,
        temperature: f64,
        progress: &dyn Progress,
    ) -> Result<Tensor>;
}

impl Teacher for Reference {
    fn log_probs(&self, batch: &TokenBatch, temperature: f64, _: &dyn Progress) -> Result<Tensor> {
        Self::log_probs(self, batch, temperature)
    }
}
