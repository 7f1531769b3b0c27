//! Drawing completions from a policy.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache, Parameters, SequenceId};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::categorical::Distribution;
use super::decode::decode_tokens;
use super::logit_filters::{Truncated, Truncation};
use super::stop_strings::{DecodeText, StopStrings};
use crate::random::{generator, uniform};
use crate::{FinishReason, Interrupted, NoProgress, Progress, Prompt, Rollout};

/// About so many prompt tokens go through the decoder at a time.
const PREFILL_TOKENS: usize = 512;

/// How completions are drawn.
///
/// A token is drawn from `softmax(logits / temperature)`, of which `top_k`, `top_p` and `min_p` leave the likelier tokens, in this
/// order and as in transformers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingConfig {
    /// Logits are divided by this before the softmax. Above 0; 1 is the policy itself.
    pub temperature: f64,
    /// Only the so many likeliest tokens may be drawn, and those as likely as the last of them; 0 is all.
    pub top_k: usize,
    /// Only the likeliest tokens that together have at least this probability may be drawn (nucleus sampling, Holtzman et al.
    /// 2020); the least number of them, the lower id first among equals. Above 0; 1 is all.
    pub top_p: f64,
    /// Only tokens with at least this times the greatest probability may be drawn (Nguyen et al. 2025). 0 is all.
    pub min_p: f64,
    /// Always take the likeliest token, for evaluation. Log-probs are then still those at `temperature`.
    pub greedy: bool,
    /// The greatest length of a completion in tokens, the stop token included. At least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end a completion once its text has one of them, wherever tokens begin and end. For these the sampler needs
    /// [`Sampler::with_decoder_of_text`].
    pub stop_strings: Vec<String>,
    /// The most completions that are drawn side by side, others wait until one has ended: a bound of memory, without influence on
    /// what is drawn.
    pub max_batch_size: usize,
    /// What the random numbers come from.
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
            max_batch_size: 256,
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Errs if a field has a value with which nothing can be drawn.
    pub fn validate(&self) -> Result<()> {
        ensure_temperature(self.temperature)?;
        self.truncation().validate()?;
        for (name, value) in [
            ("max_new_tokens", self.max_new_tokens),
            ("max_batch_size", self.max_batch_size),
        ] {
            ensure!(value > 0, "{name}: 0, must be at least 1");
        }
        if let Some(at) = self.stop_strings.iter().position(String::is_empty) {
            anyhow::bail!("stop_strings[{at}]: empty, must have at least one character");
        }
        Ok(())
    }

    fn truncation(&self) -> Truncation {
        Truncation {
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
        }
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
/// counting where a prompt occurs again in a batch, so that no two completions of it are the same draw. On the CPU, tokens and
/// log-probs are the same to the bit in whatever batch, order and number of threads.
///
/// Each distinct prompt is computed once, and its keys and values are shared by its completions; a completion that has ended costs
/// nothing any more, and one that waits takes its place.
pub struct Sampler {
    decoder: Decoder,
    device: Device,
    config: SamplingConfig,
    decode: Option<Arc<DecodeText>>,
    progress: Arc<dyn Progress>,
}

/// A distinct prompt of a call.
struct PromptState<'a> {
    tokens: &'a [u32],
    /// Completions that have not begun.
    waiting: usize,
    /// Its sequence in the cache and the logits `[1, V]` after it, while completions wait.
    computed: Option<(SequenceId, Tensor)>,
}

/// A completion that has not begun.
struct Waiting {
    rollout: usize,
    prompt: usize,
    random: ChaCha8Rng,
}

/// A completion that has not ended.
struct Live {
    rollout: usize,
    sequence: SequenceId,
    random: ChaCha8Rng,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    drawn_log_probs: Vec<f32>,
    end: Option<FinishReason>,
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
            decode: None,
            progress: Arc::new(NoProgress),
        })
    }

    /// With the function that turns tokens into text, in which stop strings are looked for. It is called with the last tokens of a
    /// completion, from several threads.
    pub fn with_decoder_of_text(
        mut self,
        decode: impl Fn(&[u32]) -> Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.decode = Some(Arc::new(decode));
        self
    }

    /// [`Self::with_decoder_of_text`] of `tokenizer`, special tokens left out.
    pub fn with_tokenizer(self, tokenizer: &Tokenizer) -> Self {
        let tokenizer = tokenizer.clone();
        self.with_decoder_of_text(move |tokens| decode_tokens(tokens, &tokenizer))
    }

    /// With someone who is told of every token and every completion that ends, and may stop it between two tokens.
    pub fn with_progress(mut self, progress: Arc<dyn Progress>) -> Self {
        self.progress = progress;
        self
    }

    /// How this sampler draws.
    pub fn config(&self) -> &SamplingConfig {
        &self.config
    }

    /// `num_generations` completions of each prompt, those of one prompt side by side.
    ///
    /// `stream` keeps draws apart that are otherwise the same, those of different training steps for example.
    ///
    /// Errs if there are no prompts, a prompt is empty, too long for the model or has a token that the model does not know,
    /// `num_generations` is 0, or there are stop strings and nothing to decode text with; with [`Interrupted`] if the progress says so.
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
        ensure!(
            prompts.len().saturating_mul(num_generations) <= u32::MAX as usize,
            "num_generations: {num_generations} for each of {} prompts, must be fewer than 2^32 in all",
            prompts.len()
        );
        let sample = || self.sample_all(prompts, num_generations, stream);
        if self.device.is_cpu() {
            // On one of the threads that share the work, so that it need not be woken for each operator.
            rayon::join(sample, || ()).0
        } else {
            // Candle's default stream on CUDA is another in each thread: there, weights might be read before they are written.
            sample()
        }
    }

    fn sample_all(
        &self,
        prompts: &[&Prompt],
        num_generations: usize,
        stream: u64,
    ) -> Result<Vec<Rollout>> {
        let stop_strings = self.stop_strings()?;
        let (mut rollouts, mut states, waiting) = self.plan(prompts, num_generations, stream);
        let mut waiting = waiting.into_iter();
        let mut cache = PagedCache::new(
            self.decoder.config(),
            self.decoder.output_weight().dtype(),
            &self.device,
        )?;
        let mut live: Vec<Live> = Vec::new();
        loop {
            if self.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            if !live.is_empty() {
                let new: Vec<(SequenceId, &[u32])> = live
                    .iter()
                    .map(|l| (l.sequence, &l.tokens[l.tokens.len() - 1..]))
                    .collect();
                let logits = self.decoder.next_logits(&new, &mut cache)?;
                let rows: Vec<usize> = (0..live.len()).collect();
                self.draw(&logits, &rows, &mut live, stop_strings.as_ref(), &rollouts)?;
                self.finish(&mut live, &mut rollouts, &mut cache)?;
            }
            let places = self.config.max_batch_size - live.len();
            let admitted: Vec<Waiting> = waiting.by_ref().take(places).collect();
            if !admitted.is_empty() {
                let (logits, rows, mut begun) = self.begin(admitted, &mut states, &mut cache)?;
                self.draw(&logits, &rows, &mut begun, stop_strings.as_ref(), &rollouts)?;
                self.finish(&mut begun, &mut rollouts, &mut cache)?;
                live.append(&mut begun);
            } else if live.is_empty() {
                return Ok(rollouts);
            }
        }
    }

    fn ensure_prompts_fit(&self, prompts: &[&Prompt]) -> Result<()> {
        ensure!(
            !prompts.is_empty(),
            "prompts: none, there must be at least one"
        );
        let max_positions = self.decoder.config().max_position_embeddings;
        let vocabulary = self.decoder.config().vocab_size;
        for prompt in prompts {
            let (index, length) = (prompt.index, prompt.tokens.len());
            ensure!(
                length > 0,
                "prompt {index}: no tokens, must have at least one"
            );
            ensure!(
                length.saturating_add(self.config.max_new_tokens) <= max_positions,
                "prompt {index}: {length} tokens and max_new_tokens {} make more than the {max_positions} positions of the model",
                self.config.max_new_tokens
            );
            if let Some(at) = prompt.tokens.iter().position(|&t| t as usize >= vocabulary) {
                anyhow::bail!(
                    "prompt {index}: token {at} is {}, must be below the {vocabulary} of the model",
                    prompt.tokens[at]
                );
            }
        }
        Ok(())
    }

    fn stop_strings(&self) -> Result<Option<StopStrings>> {
        let strings = &self.config.stop_strings;
        if strings.is_empty() {
            return Ok(None);
        }
        let decode = self.decode.clone().context(
            "stop_strings: the sampler cannot decode text, it must be given how by with_decoder_of_text",
        )?;
        Ok(Some(StopStrings::new(strings.clone(), decode)))
    }

    /// All completions, the distinct prompts, and what waits.
    fn plan<'a>(
        &self,
        prompts: &[&'a Prompt],
        num_generations: usize,
        stream: u64,
    ) -> (Vec<Rollout>, Vec<PromptState<'a>>, Vec<Waiting>) {
        let mut state_of = HashMap::new();
        let mut states: Vec<PromptState> = Vec::new();
        let mut rollouts = Vec::with_capacity(prompts.len() * num_generations);
        let mut waiting = Vec::with_capacity(rollouts.capacity());
        let mut drawn_of: HashMap<u64, usize> = HashMap::new();
        for prompt in prompts {
            let drawn = drawn_of.entry(prompt.index).or_default();
            let samples = *drawn..*drawn + num_generations;
            *drawn = samples.end;
            let state = *state_of.entry(&prompt.tokens).or_insert_with(|| {
                states.push(PromptState {
                    tokens: &prompt.tokens,
                    waiting: 0,
                    computed: None,
                });
                states.len() - 1
            });
            states[state].waiting += num_generations;
            for sample in samples {
                waiting.push(Waiting {
                    rollout: rollouts.len(),
                    prompt: state,
                    random: generator(self.config.seed, stream, prompt.index, sample as u64),
                });
                rollouts.push(Rollout {
                    prompt_index: prompt.index,
                    sample_index: sample,
                    prompt_tokens: prompt.tokens.clone(),
                    completion_tokens: Vec::new(),
                    log_probs: Vec::new(),
                    drawn_log_probs: Vec::new(),
                    finish_reason: FinishReason::Length,
                });
            }
        }
        (rollouts, states, waiting)
    }

    /// Computes the prompts of the admitted completions that are not computed yet, and lets the completions begin: the logits
    /// after the prompts, and which row of them each completion draws from.
    fn begin(
        &self,
        admitted: Vec<Waiting>,
        states: &mut [PromptState],
        cache: &mut PagedCache,
    ) -> Result<(Tensor, Vec<usize>, Vec<Live>)> {
        let mut wanted: Vec<usize> = admitted.iter().map(|w| w.prompt).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut pass: Vec<usize> = Vec::new();
        let mut tokens = 0;
        for &prompt in &wanted {
            if states[prompt].computed.is_some() {
                continue;
            }
            pass.push(prompt);
            tokens += states[prompt].tokens.len();
            if tokens >= PREFILL_TOKENS {
                self.compute(&pass, states, cache)?;
                pass.clear();
                tokens = 0;
            }
        }
        self.compute(&pass, states, cache)?;

        let mut logits = Vec::with_capacity(wanted.len());
        let mut sequences = HashMap::new();
        for &prompt in &wanted {
            let (sequence, of_prompt) = states[prompt]
                .computed
                .as_ref()
                .context("a prompt was not computed")?;
            sequences.insert(prompt, (*sequence, logits.len()));
            logits.push(of_prompt.clone());
        }
        let mut rows = Vec::with_capacity(admitted.len());
        let mut begun = Vec::with_capacity(admitted.len());
        for completion in admitted {
            let (sequence, row) = sequences[&completion.prompt];
            rows.push(row);
            begun.push(Live {
                rollout: completion.rollout,
                sequence: cache.fork(sequence)?,
                random: completion.random,
                tokens: Vec::new(),
                log_probs: Vec::new(),
                drawn_log_probs: Vec::new(),
                end: None,
            });
            let state = &mut states[completion.prompt];
            state.waiting -= 1;
            if state.waiting == 0 {
                state.computed = None;
                cache.remove(sequence)?;
            }
        }
        Ok((Tensor::cat(&logits, 0)?, rows, begun))
    }

    fn compute(
        &self,
        prompts: &[usize],
        states: &mut [PromptState],
        cache: &mut PagedCache,
    ) -> Result<()> {
        if prompts.is_empty() {
            return Ok(());
        }
        let new: Vec<(SequenceId, &[u32])> = prompts
            .iter()
            .map(|&prompt| (cache.add(), states[prompt].tokens))
            .collect();
        let logits = self.decoder.next_logits(&new, cache)?;
        for (row, (&prompt, (sequence, _))) in prompts.iter().zip(new).enumerate() {
            states[prompt].computed = Some((sequence, logits.narrow(0, row, 1)?));
        }
        Ok(())
    }

    /// Draws the next token of each completion, from the row of `logits` that `rows` says.
    fn draw(
        &self,
        logits: &Tensor,
        rows: &[usize],
        live: &mut [Live],
        stop_strings: Option<&StopStrings>,
        rollouts: &[Rollout],
    ) -> Result<()> {
        let vocabulary = logits.dim(1)?;
        let logits = logits
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .contiguous()?;
        let (storage, layout) = logits.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            anyhow::bail!("logits: not f32 on the CPU");
        };
        let values = &values[layout.start_offset()..];
        let results: Vec<Result<()>> = live
            .par_iter_mut()
            .zip(rows)
            .map(|(l, row)| {
                let logits = &values[row * vocabulary..][..vocabulary];
                self.draw_one(logits, l, stop_strings).with_context(|| {
                    let rollout = &rollouts[l.rollout];
                    format!(
                        "completion {} of prompt {}, token {}",
                        rollout.sample_index,
                        rollout.prompt_index,
                        l.tokens.len()
                    )
                })
            })
            .collect();
        results.into_iter().collect()
    }

    fn draw_one(
        &self,
        logits: &[f32],
        l: &mut Live,
        stop_strings: Option<&StopStrings>,
    ) -> Result<()> {
        let distribution = Distribution::new(logits, self.config.temperature)?;
        let truncation = self.config.truncation();
        let (token, drawn_log_prob) = if self.config.greedy {
            (distribution.mode(), 0.)
        } else {
            let u = uniform(&mut l.random);
            if truncation.is_off() {
                let token = distribution.quantile(u);
                (token, distribution.log_prob(token))
            } else {
                Truncated::new(&distribution, truncation).quantile(u)
            }
        };
        l.log_probs.push(distribution.log_prob(token));
        l.drawn_log_probs.push(drawn_log_prob);
        l.tokens.push(token);
        let at_string = match stop_strings {
            Some(stop_strings) => stop_strings.end(&l.tokens)?,
            None => false,
        };
        l.end = if self.config.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken)
        } else if at_string {
            Some(FinishReason::StopString)
        } else if l.tokens.len() == self.config.max_new_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        Ok(())
    }

    /// Takes the completions that have ended out of `live`, each of which has just got a token.
    fn finish(
        &self,
        live: &mut Vec<Live>,
        rollouts: &mut [Rollout],
        cache: &mut PagedCache,
    ) -> Result<()> {
        let drawn = live.len();
        for l in live.extract_if(.., |l| l.end.is_some()) {
            cache.remove(l.sequence)?;
            let rollout = &mut rollouts[l.rollout];
            rollout.completion_tokens = l.tokens;
            rollout.log_probs = l.log_probs;
            rollout.drawn_log_probs = l.drawn_log_probs;
            rollout.finish_reason = l.end.unwrap_or(FinishReason::Length);
        }
        self.progress.advance(drawn - live.len(), drawn);
        Ok(())
    }
}
