//! Weights of tokens by their text.

use std::ops::Range;

use anyhow::{Context, Result, anyhow};
use candle_core::{Device, Tensor};
use candle_grpo_core::validate::non_negative;
use candle_grpo_rewards::compile_pattern;
use regex::Regex;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::TokenBatch;
use crate::sequence::Column;

/// A weight for the tokens whose text matches a pattern (`loss_scale` in ms-swift).
///
/// It multiplies every term of the policy loss at these tokens except the entropy and the
/// observations. Denominators do not change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TokenWeight {
    /// Regular expression, which is searched in each response with its special tokens. `(?s)` at
    /// the start lets `.` match line ends.
    pub pattern: String,
    /// Weight of each token that shares a character with a match, at least 0.
    pub weight: f64,
}

impl TokenWeight {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if the pattern is invalid, or the weight is negative or not finite.
    pub fn validate(&self) -> Result<()> {
        compile_pattern(&self.pattern)?;
        Ok(non_negative("weight", self.weight)?)
    }
}

/// Compiled [`TokenWeight`]s.
pub(super) struct TokenWeights(Vec<(Regex, f32)>);

impl TokenWeights {
    /// Compiles the options. `None` if there are none.
    pub(super) fn new(all: &[TokenWeight]) -> Result<Option<Self>> {
        let compiled = all.iter().map(|one| {
            let pattern = compile_pattern(&one.pattern)?;
            Ok((pattern, one.weight as f32))
        });
        let compiled = compiled.collect::<Result<Vec<_>>>()?;
        Ok((!compiled.is_empty()).then_some(Self(compiled)))
    }

    /// Returns the weight of each response token, f32 `[B, T]`; 0 for padding.
    pub(super) fn of_batch(
        &self,
        tokens: &TokenBatch,
        tokenizer: &Tokenizer,
        device: &Device,
    ) -> Result<Tensor> {
        let (_, width) = tokens.dims();
        let rows = tokens.sequences().iter().enumerate().map(|(number, row)| {
            let weights = self.of_tokens(row.response(), tokenizer);
            weights.with_context(|| format!("token_weights: sequence {number}"))
        });
        Column::per_token(rows.collect::<Result<Vec<_>>>()?).padded(width, device)
    }

    /// Returns the weight of each token: that of the last pattern that matches it, and 1 for
    /// others.
    fn of_tokens(&self, tokens: &[u32], tokenizer: &Tokenizer) -> Result<Vec<f32>> {
        let (text, places) = places(tokens, tokenizer)?;
        let mut weights = vec![1.; tokens.len()];
        for (pattern, weight) in &self.0 {
            for found in pattern.find_iter(&text) {
                let overlaps =
                    |place: &Range<usize>| place.start < found.end() && place.end > found.start();
                let pairs = weights.iter_mut().zip(&places);
                let matched = pairs.filter(|(_, place)| overlaps(place));
                matched.for_each(|(own, _)| *own = *weight);
            }
        }
        Ok(weights)
    }
}

/// Returns the text for some tokens with special tokens, and the place of each token in it. Tokens
/// that are parts of a character have the whole character.
fn places(tokens: &[u32], tokenizer: &Tokenizer) -> Result<(String, Vec<Range<usize>>)> {
    let mut stream = tokenizer.decode_stream(false);
    let mut text = String::new();
    let mut places = Vec::with_capacity(tokens.len());
    for (at, &token) in tokens.iter().enumerate() {
        let part = stream.step(token).map_err(|error| anyhow!("{error}"))?;
        if let Some(part) = part {
            let place = text.len()..text.len() + part.len();
            places.resize(at + 1, place);
            text += &part;
        }
    }
    places.resize(tokens.len(), text.len()..text.len());
    Ok((text, places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::character_tokenizer;

    fn weights(all: &[(&str, f64)], text: &str) -> Vec<f32> {
        let all = all.iter().map(|(pattern, weight)| TokenWeight {
            pattern: (*pattern).to_owned(),
            weight: *weight,
        });
        let weights = TokenWeights::new(&all.collect::<Vec<_>>())
            .unwrap()
            .unwrap();
        let tokenizer = character_tokenizer("abcé").unwrap();
        let tokens = tokenizer.encode(text, false).unwrap();
        weights.of_tokens(tokens.get_ids(), &tokenizer).unwrap()
    }

    #[test]
    fn matched_tokens_have_the_weight_of_the_last_pattern() {
        assert_eq!(weights(&[("b+", 0.5)], "abbcb"), [1., 0.5, 0.5, 1., 0.5]);
        assert_eq!(weights(&[("b+", 0.5), ("^ab", 3.)], "abb"), [3., 3., 0.5]);
        assert_eq!(weights(&[("éc", 0.)], "aéc"), [1., 0., 0.]);
        // An empty match has no character.
        assert_eq!(weights(&[("b*", 0.)], "ab"), [1., 0.]);
        assert!(weights(&[("b", 0.)], "").is_empty());
    }
}
