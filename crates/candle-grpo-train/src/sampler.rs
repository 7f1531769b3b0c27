//! Drawing completions from a policy.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_nn::{Decoder, DecoderConfig, KvCache, Parameters};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::draw::{Distribution, generator, uniform};
use crate::padding::{left_padded, padding_mask};
use crate::{FinishReason, Prompt, Rollout};

/// How completions are drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingConfig {
    /// Logits are divided by this before the softmax. Above 0; 1 is the policy itself.
    pub temperature: f64,
    /// Always take the likeliest token, for evaluation. Log-probs are then still those at `temperature`.
    pub greedy: bool,
    /// The greatest length of a completion in tokens, the stop token included. At least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion.
    pub stop_token_ids: Vec<u32>,
    /// What the random numbers come from.
    pub seed: u64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            temperature: 1.,
            greedy: false,
            max_new_tokens: 256,
            stop_token_ids: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Errs if a field has a value with which nothing can be drawn.
    pub fn validate(&self) -> Result<()> {
        ensure_temperature(self.temperature)?;
        ensure!(
            self.max_new_tokens > 0,
            "max_new_tokens: 0, must be at least 1"
        );
        Ok(())
    }
}

/// Errs unless logits can be divided by `temperature`.
pub(crate) fn ensure_temperature(temperature: f64) -> Result<()> {
    ensure!(
        temperature > 0. && temperature.is_finite(),
        "temperature: {temperature}, must be finite and above 0 (for the likeliest token set greedy)"
    );
    Ok(())
}

/// Draws completions from a policy whose parameters it shares: after an optimiser step it draws from the new policy.
///
/// The random numbers of a completion depend on the seed, the `stream`, the index of its prompt and its number among
/// the completions of that prompt, and on nothing else: the other prompts of the batch do not matter. The number goes on
/// counting where a prompt occurs again in a batch, so that no two completions of it are the same draw.
pub struct Sampler {
    decoder: Decoder,
    device: Device,
    config: SamplingConfig,
}

/// A completion that has not ended, with its row in the attention mask and the cache.
struct Live {
    rollout: usize,
    row: u32,
    random: ChaCha8Rng,
}

impl Sampler {
    /// A sampler for the policy `parameters` of shape `model`.
    pub fn new(
        model: &DecoderConfig,
        parameters: &Parameters,
        config: SamplingConfig,
    ) -> Result<Self> {
        Self::of_decoder(
            Decoder::new(model, parameters.detached_var_builder())?,
            config,
        )
    }

    /// A sampler for the policy that `decoder`, which should record no graph, computes.
    pub fn of_decoder(decoder: Decoder, config: SamplingConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            device: decoder.output_weight().device().clone(),
            decoder,
            config,
        })
    }

    /// How this sampler draws.
    pub fn config(&self) -> &SamplingConfig {
        &self.config
    }

    /// `num_generations` completions of each prompt, those of one prompt side by side.
    ///
    /// `stream` keeps draws apart that are otherwise the same, those of different training steps for example.
    ///
    /// Errs if there are no prompts, a prompt is empty or too long for the model, or `num_generations` is 0.
    pub fn sample(
        &self,
        prompts: &[&Prompt],
        num_generations: usize,
        stream: u64,
    ) -> Result<Vec<Rollout>> {
        ensure!(
            num_generations > 0,
            "num_generations: 0, must be at least 1"
        );
        self.ensure_prompts_fit(prompts)?;

        // Each distinct prompt runs once.
        let mut row_of = HashMap::new();
        let mut distinct: Vec<&[u32]> = Vec::new();
        let mut rollouts = Vec::with_capacity(prompts.len() * num_generations);
        let mut live = Vec::with_capacity(rollouts.capacity());
        let mut drawn_of: HashMap<u64, usize> = HashMap::new();
        for prompt in prompts {
            let drawn = drawn_of.entry(prompt.index).or_default();
            let samples = *drawn..*drawn + num_generations;
            *drawn = samples.end;
            let row = *row_of.entry(&prompt.tokens).or_insert_with(|| {
                distinct.push(&prompt.tokens);
                distinct.len() as u32 - 1
            });
            for sample in samples {
                live.push(Live {
                    rollout: rollouts.len(),
                    row,
                    random: generator(self.config.seed, stream, prompt.index, sample as u64),
                });
                rollouts.push(Rollout {
                    prompt_index: prompt.index,
                    sample_index: sample,
                    prompt_tokens: prompt.tokens.clone(),
                    completion_tokens: Vec::new(),
                    log_probs: Vec::new(),
                    finish_reason: FinishReason::Length,
                });
            }
        }

        let mut cache = KvCache::new(self.decoder.config().num_hidden_layers);
        let width = distinct.iter().map(|p| p.len()).max().unwrap_or(0);
        let mut mask = padding_mask(&distinct, width, &self.device)?;
        let ids = left_padded(&distinct, width, &self.device)?;
        let mut logits = self.next_logits(&ids, &mask, &mut cache)?;
        let mut rows = distinct.len();
        for length in 1..=self.config.max_new_tokens {
            let drawn = self.draw(&logits, &mut live, &mut rollouts)?;
            let ended: Vec<bool> = live
                .iter()
                .map(|l| rollouts[l.rollout].finish_reason == FinishReason::Stop)
                .collect();
            let (tokens, kept): (Vec<u32>, Vec<u32>) = drawn
                .iter()
                .zip(&live)
                .zip(&ended)
                .filter(|(_, ended)| !**ended)
                .map(|((&token, l), _)| (token, l.row))
                .unzip();
            if tokens.is_empty() || length == self.config.max_new_tokens {
                break;
            }
            let mut ended = ended.into_iter();
            live.retain(|_| !ended.next().unwrap_or(false));
            if kept.len() != rows || kept.iter().enumerate().any(|(i, &row)| row != i as u32) {
                let kept = Tensor::new(kept.as_slice(), &self.device)?;
                cache.select_rows(&kept)?;
                mask = mask.index_select(&kept, 0)?;
            }
            rows = live.len();
            for (row, l) in live.iter_mut().enumerate() {
                l.row = row as u32;
            }
            let ids = Tensor::from_vec(tokens, (rows, 1), &self.device)?;
            let ones = Tensor::ones((rows, 1), mask.dtype(), &self.device)?;
            mask = Tensor::cat(&[&mask, &ones], 1)?;
            logits = self.next_logits(&ids, &mask, &mut cache)?;
        }
        Ok(rollouts)
    }

    fn ensure_prompts_fit(&self, prompts: &[&Prompt]) -> Result<()> {
        ensure!(
            !prompts.is_empty(),
            "prompts: none, there must be at least one"
        );
        let max_positions = self.decoder.config().max_position_embeddings;
        for prompt in prompts {
            let (index, length) = (prompt.index, prompt.tokens.len());
            ensure!(
                length > 0,
                "prompt {index}: no tokens, must have at least one"
            );
            ensure!(
                length + self.config.max_new_tokens <= max_positions,
                "prompt {index}: {length} tokens and max_new_tokens {} make more than the {max_positions} positions of the model",
                self.config.max_new_tokens
            );
        }
        Ok(())
    }

    /// The logits `[rows, V]` after the last of `ids`.
    fn next_logits(&self, ids: &Tensor, mask: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let hidden = self.decoder.hidden_states(ids, mask, Some(cache))?;
        let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?;
        Ok(self.decoder.logits(&last.contiguous()?)?)
    }

    /// Draws the next token of each live completion and adds it to its rollout.
    fn draw(
        &self,
        logits: &Tensor,
        live: &mut [Live],
        rollouts: &mut [Rollout],
    ) -> Result<Vec<u32>> {
        let vocabulary = logits.dim(1)?;
        let logits = logits
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let mut drawn = Vec::with_capacity(live.len());
        for l in live {
            let rollout = &mut rollouts[l.rollout];
            let start = l.row as usize * vocabulary;
            let row = &logits[start..start + vocabulary];
            let distribution =
                Distribution::new(row, self.config.temperature).with_context(|| {
                    format!(
                        "completion {} of prompt {}, token {}",
                        rollout.sample_index,
                        rollout.prompt_index,
                        rollout.completion_tokens.len()
                    )
                })?;
            let token = if self.config.greedy {
                distribution.mode()
            } else {
                distribution.quantile(uniform(&mut l.random))
            };
            rollout.completion_tokens.push(token);
            rollout.log_probs.push(distribution.log_prob(token));
            if self.config.stop_token_ids.contains(&token) {
                rollout.finish_reason = FinishReason::Stop;
            }
            drawn.push(token);
        }
        Ok(drawn)
    }
}
