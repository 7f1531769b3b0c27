//! From a decoder to the log-probs of responses.

use anyhow::Result;
use candle_core::Tensor;
use candle_grpo_loss::{LogProbOptions, TokenLogProbs, linear_log_prob};
use candle_grpo_nn::Decoder;

use crate::TokenBatch;

/// Log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`, 0 outside the response mask. No logits
/// are held. It records a graph if the decoder does.
pub(crate) fn response_log_probs(
    decoder: &Decoder,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    Ok(linear_log_prob(
        &predicting_states(decoder, batch)?,
        decoder.output_weight(),
        None,
        &batch.targets,
        temperature,
        LogProbOptions {
            mask: Some(&batch.response_mask),
            ..Default::default()
        },
    )?)
}

/// The hidden states `[B, T, H]` of the positions that predict the responses of `batch`: only these need go further.
pub(crate) fn predicting_states(decoder: &Decoder, batch: &TokenBatch) -> Result<Tensor> {
    let (_, t) = batch.dims()?;
    let hidden = decoder.hidden_states(&batch.input_ids, &batch.attention_mask, None)?;
    // Not negative, as the inputs are at least as wide as the targets.
    Ok(hidden.narrow(1, hidden.dim(1)? - t, t)?.contiguous()?)
}
