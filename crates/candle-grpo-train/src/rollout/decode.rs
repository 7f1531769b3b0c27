//! The texts of completions.

use anyhow::{Context, Result};
use tokenizers::Tokenizer;

use crate::Rollout;

/// The texts of the completions of `rollouts` without special tokens. Those of trajectories have
/// them, as they separate the turns.
pub(crate) fn decode(rollouts: &[Rollout], tokenizer: &Tokenizer) -> Result<Vec<String>> {
    texts(rollouts, |rollout| match rollout.episode {
        None => decode_tokens(&rollout.completion.tokens, tokenizer),
        Some(_) => decode_with_special_tokens(&rollout.completion.tokens, tokenizer),
    })
}

/// The texts that rewards score: those of the last turns, special tokens left out.
pub(crate) fn decode_answers(rollouts: &[Rollout], tokenizer: &Tokenizer) -> Result<Vec<String>> {
    texts(rollouts, |rollout| {
        decode_tokens(rollout.last_turn(), tokenizer)
    })
}

fn texts(rollouts: &[Rollout], decode: impl Fn(&Rollout) -> Result<String>) -> Result<Vec<String>> {
    rollouts
        .iter()
        .map(|rollout| {
            decode(rollout).with_context(|| {
                format!(
                    "completion {} of prompt {} cannot be decoded",
                    rollout.sample_index, rollout.prompt_index
                )
            })
        })
        .collect()
}

/// The text of some tokens with special tokens.
pub(crate) fn decode_with_special_tokens(tokens: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    tokenizer
        .decode(tokens, false)
        .map_err(|e| anyhow::anyhow!("{e}"))
}

/// The text of some tokens, special tokens left out.
pub(crate) fn decode_tokens(tokens: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    tokenizer
        .decode(tokens, true)
        .map_err(|e| anyhow::anyhow!("{e}"))
}
