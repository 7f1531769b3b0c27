//! The texts of completions.

use anyhow::{Context, Result};
use tokenizers::Tokenizer;

use crate::Rollout;

/// The texts of the completions of `rollouts`, special tokens left out.
pub(crate) fn decode(rollouts: &[Rollout], tokenizer: &Tokenizer) -> Result<Vec<String>> {
    rollouts
        .iter()
        .map(|rollout| {
            decode_tokens(&rollout.completion.tokens, tokenizer).with_context(|| {
                format!(
                    "completion {} of prompt {} cannot be decoded",
                    rollout.sample_index, rollout.prompt_index
                )
            })
        })
        .collect()
}

/// The text of some tokens, special tokens left out.
pub(crate) fn decode_tokens(tokens: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    tokenizer
        .decode(tokens, true)
        .map_err(|e| anyhow::anyhow!("{e}"))
}
