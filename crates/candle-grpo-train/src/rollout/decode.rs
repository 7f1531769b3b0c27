//! Completion texts.

use anyhow::{Context, Result};
use tokenizers::Tokenizer;

use super::SamplingConfig;
use crate::Rollout;

/// Returns the completion texts for `rollouts`, as [`answer_text`]. Trajectory texts keep all
/// special tokens, because they separate the turns.
pub(crate) fn decode(
    rollouts: &[Rollout],
    sampling: &SamplingConfig,
    tokenizer: &Tokenizer,
) -> Result<Vec<String>> {
    texts(rollouts, |rollout| match rollout.episode {
        None => answer_text(&rollout.completion.tokens, sampling, tokenizer),
        Some(_) => decode_tokens(&rollout.completion.tokens, tokenizer),
    })
}

/// Returns the texts that rewards score: the last turns, as [`answer_text`].
pub(crate) fn decode_answers(
    rollouts: &[Rollout],
    sampling: &SamplingConfig,
    tokenizer: &Tokenizer,
) -> Result<Vec<String>> {
    texts(rollouts, |rollout| {
        answer_text(rollout.last_turn(), sampling, tokenizer)
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

/// Returns an answer's text as the policy wrote it, with special tokens such as `<think>`, but
/// without a final one that `sampling` stops at.
///
/// A stop string that is a closing tag belongs to the answer. It stays, like all other stop
/// strings.
///
/// # Errors
///
/// Fails if the tokenizer cannot decode the tokens.
pub fn answer_text(
    tokens: &[u32],
    sampling: &SamplingConfig,
    tokenizer: &Tokenizer,
) -> Result<String> {
    let Some((&last, before)) = tokens.split_last() else {
        return Ok(String::new());
    };
    let name = decode_tokens(&[last], tokenizer)?;
    let is_special = || Ok::<_, anyhow::Error>(without_special_tokens(&[last], tokenizer)? != name);
    let stops = sampling.stop_token_ids.contains(&last)
        || !name.starts_with("</") && sampling.stop_strings.contains(&name);
    if stops && is_special()? {
        decode_tokens(before, tokenizer)
    } else {
        decode_tokens(tokens, tokenizer)
    }
}

/// Returns the text for some tokens, with special tokens.
pub(crate) fn decode_tokens(tokens: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    tokenizer
        .decode(tokens, false)
        .map_err(|e| anyhow::anyhow!("{e}"))
}

/// Returns the text for some tokens, without special tokens.
fn without_special_tokens(tokens: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    tokenizer
        .decode(tokens, true)
        .map_err(|e| anyhow::anyhow!("{e}"))
}
