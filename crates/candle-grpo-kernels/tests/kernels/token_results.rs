//! The log-prob operators' three results.

use candle_core::{Device, Result, Tensor};
use candle_grpo_kernels::TokenLogProbs;
use candle_grpo_test_support::{noise_tensor, token_ids};

/// Returns random token ids below `vocab`, one per row.
pub(crate) fn targets(rows: usize, vocab: usize, seed: u64, device: &Device) -> Result<Tensor> {
    Tensor::from_vec(token_ids(rows, vocab, seed), rows, device)
}

/// Returns log-probs, entropies and log-sum-exps.
pub(crate) fn results(tokens: &TokenLogProbs) -> [Tensor; 3] {
    let TokenLogProbs {
        log_probs,
        entropy,
        log_sum_exp,
    } = tokens.clone();
    [log_probs, entropy, log_sum_exp]
}

/// Returns derivatives of [`score`] with respect to the three results: random numbers.
pub(crate) fn derivatives(tokens: &TokenLogProbs) -> Result<TokenLogProbs> {
    let x = &tokens.log_probs;
    let weights = |seed| noise_tensor(x.shape(), seed, x.dtype(), x.device());
    Ok(TokenLogProbs {
        log_probs: weights(1)?,
        entropy: weights(2)?,
        log_sum_exp: weights(3)?,
    })
}

/// Returns a random linear combination of all results.
pub(crate) fn score(tokens: &TokenLogProbs) -> Result<Tensor> {
    let weights = results(&derivatives(tokens)?);
    let terms = results(tokens)
        .into_iter()
        .zip(&weights)
        .map(|(result, weights)| (result * weights)?.sum_all())
        .collect::<Result<Vec<_>>>()?;
    Tensor::stack(&terms, 0)?.sum_all()
}
