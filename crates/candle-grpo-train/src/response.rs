//! From a decoder to the log-probs of responses.

use anyhow::Result;
use candle_grpo_loss::{TokenLogProbs, token_log_probs};
use candle_grpo_nn::Decoder;

use crate::TokenBatch;

/// Log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`.
///
/// Only the positions that predict a response go through the output layer. It records a graph if the decoder does.
pub(crate) fn response_log_probs(
    decoder: &Decoder,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let (_, t) = batch.dims()?;
    let hidden = decoder.hidden_states(&batch.input_ids, &batch.attention_mask, None)?;
    // Not negative, as the inputs are at least as wide as the targets.
    let predicting = hidden.narrow(1, hidden.dim(1)? - t, t)?.contiguous()?;
    let logits = decoder.logits(&predicting)?;
    Ok(token_log_probs(&logits, &batch.targets, temperature)?)
}
