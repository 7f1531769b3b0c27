//! From a decoder to the log-probs of responses.

use anyhow::Result;
use candle_core::Tensor;
use candle_grpo_loss::{TokenLogProbs, token_log_probs};
use candle_grpo_nn::Decoder;

use crate::TokenBatch;

/// Log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`. It records a graph if the decoder does.
pub(crate) fn response_log_probs(
    decoder: &Decoder,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let logits = decoder.logits(&predicting_states(decoder, batch)?)?;
    Ok(token_log_probs(&logits, &batch.targets, temperature)?)
}

/// The hidden states `[B, T, H]` of the positions that predict the responses of `batch`: only these need go further.
pub(crate) fn predicting_states(decoder: &Decoder, batch: &TokenBatch) -> Result<Tensor> {
    let (_, t) = batch.dims()?;
    let hidden = decoder.hidden_states(&batch.input_ids, &batch.attention_mask, None)?;
    // Not negative, as the inputs are at least as wide as the targets.
    Ok(hidden.narrow(1, hidden.dim(1)? - t, t)?.contiguous()?)
}
