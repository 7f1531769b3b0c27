//! Sampling settings.

use anyhow::Result;
use candle_grpo_core::validate;
use candle_grpo_kernels::{DrawOptions, TEMPERATURES};
use serde::{Deserialize, Serialize};

use super::structured_outputs::StructuredOutputs;
use candle_grpo_base::within;

/// The distribution that completions are sampled from, and where they end.
///
/// Tokens are sampled from `softmax(logits / temperature)`. Then `top_k`, `top_p` and `min_p` keep
/// the most likely tokens, in this order and as in transformers. For training, keep the defaults:
/// log-probs then belong to the policy itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divisor for the logits before the softmax, from 1e-6 to 1e6. 1 is the policy itself.
    pub temperature: f64,
    /// Sample from the `top_k` most likely tokens, ties included. 0 disables it.
    pub top_k: usize,
    /// Sample from the smallest set of most likely tokens whose total probability is at least
    /// `top_p` (nucleus sampling, Holtzman et al. 2020). Above 0; 1 disables it.
    pub top_p: f64,
    /// Sample from tokens with at least `min_p` times the highest probability (Nguyen et al.
    /// 2025). 0 disables it.
    pub min_p: f64,
    /// Always choose the most likely token, for evaluation. Log-probs are still computed at
    /// `temperature`.
    pub greedy: bool,
    /// Maximum completion length in tokens, including the stop token. At least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end a completion as soon as its text contains one, whatever the token
    /// boundaries. The text includes special tokens, so a string may be one. In Rust, they need
    /// [`Sampler::with_tokenizer`](crate::Sampler::with_tokenizer).
    pub stop_strings: Vec<String>,
    /// Form of a completion's text: `{regex: ...}`, `{choice: [...]}`, `{json: ...}` with a JSON
    /// schema, or `{grammar: ...}`. The engine masks the tokens that break it. Needs engine `vllm`
    /// or `sglang`. Absent: any text.
    pub structured_outputs: Option<StructuredOutputs>,
    /// Maximum number of completions sampled at the same time. It limits memory, and does not
    /// influence the samples.
    pub max_batch_size: usize,
    /// Maximum memory for keys and values in MiB. Completions start when they fit. If memory runs
    /// out later, those that started last are suspended, and are computed again when there is
    /// room. On the CPU it does not influence the samples. On a GPU, each layer takes a multiple
    /// of 4 MiB. Absent: what the device has. Custom models and servers do not support it.
    pub max_cache_mib: Option<usize>,
    /// Random seed.
    pub seed: u64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            temperature: 1.,
            top_k: 0,
            top_p: 1.,
            min_p: 0.,
            greedy: false,
            max_new_tokens: 256,
            stop_token_ids: Vec::new(),
            stop_strings: Vec::new(),
            structured_outputs: None,
            max_batch_size: 256,
            max_cache_mib: None,
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// Fails if a field is out of range.
    pub fn validate(&self) -> Result<()> {
        ensure_temperature(self.temperature)?;
        validate::share("top_p", self.top_p)?;
        validate::unit_interval("min_p", self.min_p)?;
        for (name, value) in [
            ("max_new_tokens", self.max_new_tokens),
            ("max_batch_size", self.max_batch_size),
        ] {
            validate::at_least_one(name, value)?;
        }
        if let Some(mib) = self.max_cache_mib {
            validate::at_least_one("max_cache_mib", mib)?;
        }
        if let Some(at) = self.stop_strings.iter().position(String::is_empty) {
            let must = "have at least one character";
            validate::check(false, &format!("stop_strings[{at}]"), "\"\"", must)?;
        }
        match &self.structured_outputs {
            Some(structured) => structured
                .validate()
                .map_err(|error| within("structured_outputs", error)),
            None => Ok(()),
        }
    }

    /// Checks all fields for a model with `vocab_size` tokens.
    ///
    /// # Errors
    ///
    /// Fails if a field is out of range, or if the model lacks a stop token, because no completion
    /// would end with it.
    pub fn validate_for(&self, vocab_size: usize) -> Result<()> {
        self.validate()?;
        for (at, &id) in self.stop_token_ids.iter().enumerate() {
            let must = format!("be below {vocab_size}, the number of tokens of the model");
            let name = format!("stop_token_ids[{at}]");
            validate::check((id as usize) < vocab_size, &name, id, &must)?;
        }
        Ok(())
    }

    /// Returns the distribution for a token.
    pub(super) fn draw_options(&self) -> DrawOptions {
        DrawOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            greedy: self.greedy,
        }
    }
}

/// Checks that logits can be divided by `temperature`.
pub(crate) fn ensure_temperature(temperature: f64) -> Result<()> {
    let valid = TEMPERATURES.contains(&temperature);
    let must = "be from 1e-6 to 1e6 (evaluations have greedy for the most likely token)";
    let value = format_args!("{temperature:?}");
    Ok(validate::check(valid, "temperature", value, must)?)
}
