//! The policy that the trained one is kept near to.

use anyhow::Result;
use candle_core::Tensor;
use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};

use crate::TokenBatch;
use crate::response::response_log_probs;

/// A copy of a policy that does not change.
pub struct Reference {
    decoder: Decoder,
}

impl Reference {
    /// Copies `parameters` as they are now.
    pub fn new(model: &DecoderConfig, parameters: &Parameters) -> Result<Self> {
        Ok(Self {
            decoder: Decoder::new(model, parameters.frozen_var_builder()?)?,
        })
    }

    /// The log-probs of the responses of `batch` at `temperature`, f32 `[B, T]`, without a graph.
    pub fn log_probs(&self, batch: &TokenBatch, temperature: f64) -> Result<Tensor> {
        Ok(response_log_probs(&self.decoder, batch, temperature)?.log_probs)
    }
}
