//! A generator in this process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_kernels::{Draw, DrawnToken, draw_tokens};
use candle_grpo_nn::{
    ComputeCopies, ComputeDType, Decoder, DecoderConfig, Decoding, LanguageModel, Lora,
    ModelConfig, Parameters, SequenceId,
};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::generator::{CompletionSeed, Deliver, GenerationBatch, Generator, PolicyWeights};
use super::stop_strings::StopStrings;
use super::{Completion, FinishReason, SamplingConfig};
use crate::detached::model_in;
use crate::random::uniform;
use crate::{Interrupted, NotFinite, Progress};

/// When a completion starts, the cache reserves room for this many tokens.
const RESERVED_TOKENS: usize = 64;

/// After this many steps, the CPU samples from weight copies ([`Decoding::pack_weights`]). Copying
/// pays off within 3 to 10 steps, or within several times as many if the system must first provide
/// the memory.
pub(crate) const STEPS_BEFORE_PACKING: usize = 16;

/// Prompts are split into forward passes with about this many tokens.
pub(crate) const PREFILL_TOKENS: usize = 512;

/// Samples completions from a model that shares the policy's parameters: after an optimizer step,
/// it samples from the new policy. [`Self::in_dtype`] and [`Self::detached`] sample from copies.
///
/// The model is a decoder, or a custom one with the configuration `C`. For a custom model,
/// [`LanguageModel::decoding`] computes the logits, and everything else is the same.
///
/// On the CPU, a decoder's tokens and log-probs are bit-identical for any batch, order and number
/// of threads.
///
/// Each distinct prompt is computed once, and its completions share its keys and values. When a
/// completion ends, it leaves the batch, and the next one takes its place.
pub struct LocalGenerator<C: ModelConfig = DecoderConfig> {
    config: C,
    model: C::Model,
    device: Device,
    /// The weight version.
    version: AtomicU64,
    /// The copy of the trained weights, unless they are shared.
    detached: Option<Parameters>,
    /// Copies of the trained weights in the model's dtype, if that differs.
    copies: ComputeCopies,
    /// True if steps on a GPU are recorded.
    records_steps: bool,
}

/// One call to [`Generator::generate`].
struct Run<'a> {
    decoding: Box<dyn Decoding + 'a>,
    batch: &'a GenerationBatch<'a>,
    stop_strings: Option<StopStrings<'a>>,
    version: u64,
    prompts: Vec<PromptState<'a>>,
}

/// A distinct prompt in a call.
struct PromptState<'a> {
    tokens: &'a [u32],
    /// Number of completions that have not started.
    waiting: usize,
    /// Its results, while completions wait.
    computed: Option<Computed>,
}

/// A prompt's results.
#[derive(Clone)]
struct Computed {
    /// Its sequence.
    sequence: SequenceId,
    /// The logits `[1, V]` after it.
    logits: Tensor,
    /// Its tokens' experts, if they are recorded.
    experts: Option<Vec<u16>>,
}

/// A completion that has not started.
struct Waiting {
    place: usize,
    prompt: usize,
    seed: CompletionSeed,
    max_new_tokens: usize,
}

/// A completion that has not ended.
struct Live {
    place: usize,
    seed: CompletionSeed,
    max_new_tokens: usize,
    sequence: SequenceId,
    random: ChaCha8Rng,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    drawn_log_probs: Vec<f32>,
    /// Experts for all tokens but the last one, if they are recorded.
    experts: Option<Vec<u16>>,
    end: Option<FinishReason>,
}

impl LocalGenerator {
    /// Creates a generator for the policy that `decoder` computes. The decoder should record no
    /// graph.
    pub fn from_decoder(decoder: Decoder) -> Self {
        Self::from_model(decoder.config().clone(), decoder)
    }
}

impl<C: ModelConfig> LocalGenerator<C> {
    /// Creates a generator for the policy `parameters` with shape `model`.
    ///
    /// # Errors
    ///
    /// Fails if `parameters` have another shape.
    pub fn new(model: &C, parameters: &Parameters) -> Result<Self> {
        let built = model.build(parameters.detached_var_builder())?;
        Ok(Self::from_model(model.clone(), built))
    }

    /// Creates a generator for the policy that `model` computes, whose shape is `config`. The model
    /// should record no graph.
    pub fn from_model(config: C, model: C::Model) -> Self {
        Self {
            device: model.output_weight().device().clone(),
            config,
            model,
            version: AtomicU64::new(0),
            detached: None,
            copies: ComputeCopies::default(),
            records_steps: false,
        }
    }

    /// Creates a generator that shares `weights` and computes in `dtype`, with copies in that
    /// dtype. [`Generator::weights_changed`] updates them.
    ///
    /// # Errors
    ///
    /// Fails if `weights` do not have their model's shape.
    pub fn in_dtype(weights: &PolicyWeights<'_, C>, dtype: ComputeDType) -> Result<Self> {
        let (model, copies) = model_in(weights.model, weights.parameters, weights.adapters, dtype)?;
        Ok(Self {
            version: AtomicU64::new(weights.version),
            copies,
            ..Self::from_model(weights.model.clone(), model)
        })
    }

    /// Creates a generator that copies `weights` and computes in `dtype`. It samples from them
    /// until [`Generator::weights_changed`] copies others, so the policy can train on another
    /// thread. Adapters are copied, and the parameters that they extend are shared.
    ///
    /// # Errors
    ///
    /// Fails if `weights` do not have their model's shape.
    pub fn detached(weights: &PolicyWeights<'_, C>, dtype: ComputeDType) -> Result<Self> {
        let (config, parameters) = (weights.model, weights.parameters);
        let copy_of = |x: &Parameters| x.copy_to(x.device());
        let (trained, (model, copies)) = match weights.adapters {
            None => {
                let parameters = copy_of(parameters)?;
                let model = model_in(config, &parameters, None, dtype)?;
                (parameters, model)
            }
            Some(adapters) => {
                let adapters = adapters.copy_to(parameters.device())?;
                let model = model_in(config, parameters, Some(&adapters), dtype)?;
                (adapters.parameters().clone(), model)
            }
        };
        Ok(Self {
            version: AtomicU64::new(weights.version),
            detached: Some(trained),
            copies,
            ..Self::from_model(weights.model.clone(), model)
        })
    }

    /// Sets whether steps on a GPU are recorded, which is several times as fast for small models
    /// ([`Decoding::record_steps`]). By default, they are not.
    ///
    /// **No other thread may use the GPU** while a generator with recorded steps generates.
    #[must_use]
    pub fn with_recorded_steps(self, records_steps: bool) -> Self {
        Self {
            records_steps,
            ..self
        }
    }

    fn decoding(&self) -> Result<Box<dyn Decoding + '_>> {
        let mut decoding = self.model.decoding()?;
        if self.records_steps {
            decoding.record_steps();
        }
        Ok(decoding)
    }

    fn check(&self, batch: &GenerationBatch<'_>) -> Result<()> {
        batch.sampling.validate()?;
        let max_positions = self.config.max_positions();
        let vocabulary = self.config.vocab_size();
        for prompt in batch.prompts {
            let index = prompt.seeds.first().map_or(0, |seed| seed.prompt);
            let (length, new) = (prompt.tokens.len(), prompt.max_new_tokens);
            ensure!(
                length > 0,
                "prompt {index}: no tokens, must have at least one"
            );
            ensure!(
                new > 0,
                "prompt {index}: max_new_tokens 0, must be at least 1"
            );
            ensure!(
                length.saturating_add(new) <= max_positions,
                "prompt {index}: {length} tokens and max_new_tokens {new} make more than the {max_positions} positions of the model"
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
}

impl<C: ModelConfig> Generator<C> for LocalGenerator<C> {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.check(batch)?;
        let run = Run {
            decoding: self.decoding()?,
            batch,
            stop_strings: StopStrings::new(batch)?,
            version: self.version.load(Ordering::Acquire),
            prompts: Vec::new(),
        };
        if self.device.is_cpu() {
            // A thread from rayon's pool drives the model, so the pool does not have to be woken
            // for each operator.
            rayon::join(|| run.run(deliver), || ()).0
        } else {
            // A GPU may have a stream for each thread. On another thread, weights might be read
            // before they are written.
            run.run(deliver)
        }
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_, C>, _: &dyn Progress) -> Result<()> {
        if let Some(trained) = &self.detached {
            let new = weights
                .adapters
                .map_or(weights.parameters, Lora::parameters);
            let new = new.iter();
            let new = new.map(|(name, value)| (name.to_owned(), value.as_detached_tensor()));
            trained.set_values(&new.collect())?;
        }
        self.copies.refresh()?;
        self.version.store(weights.version, Ordering::Release);
        Ok(())
    }

    fn shares_weights(&self) -> bool {
        self.detached.is_none()
    }
}

impl Run<'_> {
    fn run(mut self, deliver: &mut Deliver<'_>) -> Result<()> {
        let mut waiting = self.plan().into_iter();
        let mut live: Vec<Live> = Vec::new();
        let mut steps = 0;
        loop {
            if self.batch.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            if !live.is_empty() {
                if steps == STEPS_BEFORE_PACKING {
                    self.decoding.pack_weights();
                }
                steps += 1;
                let new: Vec<(SequenceId, &[u32])> = live
                    .iter()
                    .map(|l| (l.sequence, &l.tokens[l.tokens.len() - 1..]))
                    .collect();
                let (logits, experts) = self.decoding.next_logits_and_experts(&new)?;
                let experts = self.recorded(experts, &new)?;
                for (l, experts) in live.iter_mut().zip(experts) {
                    l.experts.get_or_insert_default().extend(experts);
                }
                let rows: Vec<usize> = (0..live.len()).collect();
                self.draw(&logits, &rows, &mut live)?;
                self.finish(&mut live, deliver)?;
            }
            let places = self.batch.sampling.max_batch_size - live.len();
            let admitted: Vec<Waiting> = waiting.by_ref().take(places).collect();
            if !admitted.is_empty() {
                let (logits, rows, mut begun) = self.begin(admitted)?;
                self.draw(&logits, &rows, &mut begun)?;
                self.finish(&mut begun, deliver)?;
                live.append(&mut begun);
            } else if live.is_empty() {
                return Ok(());
            }
        }
    }

    /// Finds the distinct prompts, and lists all completions in order.
    fn plan(&mut self) -> Vec<Waiting> {
        let mut state_of = HashMap::new();
        let mut waiting = Vec::new();
        for request in self.batch.prompts {
            let prompt = *state_of.entry(request.tokens).or_insert_with(|| {
                self.prompts.push(PromptState {
                    tokens: request.tokens,
                    waiting: 0,
                    computed: None,
                });
                self.prompts.len() - 1
            });
            self.prompts[prompt].waiting += request.seeds.len();
            for &seed in &request.seeds {
                waiting.push(Waiting {
                    place: waiting.len(),
                    prompt,
                    seed,
                    max_new_tokens: request.max_new_tokens,
                });
            }
        }
        waiting
    }

    /// Starts the admitted completions. Returns the logits after their prompts, and each
    /// completion's row in them.
    fn begin(&mut self, admitted: Vec<Waiting>) -> Result<(Tensor, Vec<usize>, Vec<Live>)> {
        let mut needed: Vec<usize> = admitted.iter().map(|w| w.prompt).collect();
        needed.sort_unstable();
        needed.dedup();
        let completions = admitted.iter();
        let completions = completions.map(|w| w.max_new_tokens.min(RESERVED_TOKENS));
        let prompts = needed.iter().map(|&prompt| &self.prompts[prompt]);
        let prompts = prompts.filter(|prompt| prompt.computed.is_none());
        let prompts = prompts.map(|prompt| prompt.tokens.len());
        let positions: Vec<usize> = prompts.chain(completions).collect();
        // If there is not enough memory, the cache grows when needed.
        let _ = self.decoding.reserve(&positions);
        let mut pass: Vec<usize> = Vec::new();
        let mut tokens = 0;
        for &prompt in &needed {
            if self.prompts[prompt].computed.is_some() {
                continue;
            }
            pass.push(prompt);
            tokens += self.prompts[prompt].tokens.len();
            if tokens >= PREFILL_TOKENS {
                self.prefill(&pass)?;
                pass.clear();
                tokens = 0;
            }
        }
        self.prefill(&pass)?;

        let mut logits = Vec::with_capacity(needed.len());
        let mut sequences = HashMap::new();
        for &prompt in &needed {
            let computed = self.prompts[prompt]
                .computed
                .clone()
                .context("a prompt was not computed")?;
            let row = logits.len();
            sequences.insert(prompt, (computed.sequence, row, computed.experts));
            logits.push(computed.logits);
        }
        let mut rows = Vec::with_capacity(admitted.len());
        let mut begun = Vec::with_capacity(admitted.len());
        for completion in admitted {
            let (sequence, row, experts) = &sequences[&completion.prompt];
            let sequence = *sequence;
            rows.push(*row);
            begun.push(Live {
                place: completion.place,
                seed: completion.seed,
                max_new_tokens: completion.max_new_tokens,
                sequence: self.decoding.fork(sequence)?,
                random: completion.seed.random(),
                tokens: Vec::new(),
                log_probs: Vec::new(),
                drawn_log_probs: Vec::new(),
                experts: experts.clone(),
                end: None,
            });
            let state = &mut self.prompts[completion.prompt];
            state.waiting -= 1;
            if state.waiting == 0 {
                state.computed = None;
                self.decoding.remove(sequence)?;
            }
        }
        Ok((Tensor::cat(&logits, 0)?, rows, begun))
    }

    /// Computes the prompts' keys and values, and the logits after them.
    fn prefill(&mut self, prompts: &[usize]) -> Result<()> {
        if prompts.is_empty() {
            return Ok(());
        }
        let mut new: Vec<(SequenceId, &[u32])> = Vec::with_capacity(prompts.len());
        for &prompt in prompts {
            new.push((self.decoding.add(), self.prompts[prompt].tokens));
        }
        let (logits, experts) = self.decoding.next_logits_and_experts(&new)?;
        let mut experts = self.recorded(experts, &new)?.into_iter();
        for (row, (&prompt, (sequence, _))) in prompts.iter().zip(new).enumerate() {
            self.prompts[prompt].computed = Some(Computed {
                sequence,
                logits: logits.narrow(0, row, 1)?,
                experts: experts.next(),
            });
        }
        Ok(())
    }

    /// Returns the experts for each sequence in `new`, from those for all tokens `[N, choices]`.
    /// Empty if they are not recorded.
    fn recorded(
        &self,
        experts: Option<Tensor>,
        new: &[(SequenceId, &[u32])],
    ) -> Result<Vec<Vec<u16>>> {
        let Some(experts) = experts.filter(|_| self.batch.records_experts) else {
            return Ok(Vec::new());
        };
        let choices = experts.dim(1)?;
        let experts = experts.flatten_all()?.to_vec1::<u32>()?;
        let mut rest = experts.into_iter().map(|expert| expert as u16);
        let parts = new
            .iter()
            .map(|(_, tokens)| rest.by_ref().take(tokens.len() * choices).collect());
        Ok(parts.collect())
    }

    /// Samples each completion's next token, from its row in `logits`.
    fn draw(&self, logits: &Tensor, rows: &[usize], live: &mut [Live]) -> Result<()> {
        let (sampling, stop_strings) = (self.batch.sampling, self.stop_strings.as_ref());
        let draws: Vec<Draw> = live
            .iter_mut()
            .zip(rows)
            .map(|(l, &row)| {
                // A greedy completion needs no random number.
                let uniform = if sampling.greedy {
                    0.
                } else {
                    uniform(&mut l.random)
                };
                Draw { row, uniform }
            })
            .collect();
        let drawn = draw_tokens(logits, &draws, &sampling.draw_options())?;
        let results: Vec<Result<()>> = live
            .par_iter_mut()
            .zip(rows)
            .zip(drawn)
            .map(|((l, &row), drawn)| {
                let added = match drawn {
                    Some(drawn) => l.add(drawn, sampling, stop_strings),
                    None => no_token(&logits.get(row)?),
                };
                added.with_context(|| {
                    format!(
                        "completion {} of prompt {}, token {}",
                        l.seed.sample,
                        l.seed.prompt,
                        l.tokens.len()
                    )
                })
            })
            .collect();
        results.into_iter().collect()
    }

    /// Removes completions that have ended from `live` and delivers them. Each one in `live` has
    /// just received a token.
    fn finish(&mut self, live: &mut Vec<Live>, deliver: &mut Deliver<'_>) -> Result<()> {
        let drawn = live.len();
        for l in live.iter() {
            self.batch.progress.drawn(l.place, &l.tokens);
        }
        for l in live.extract_if(.., |l| l.end.is_some()) {
            self.decoding.remove(l.sequence)?;
            let completion = Completion {
                weight_versions: vec![self.version; l.tokens.len()],
                tokens: l.tokens,
                drawn_log_probs: l.drawn_log_probs,
                log_probs: Some(l.log_probs),
                written: None,
                finish_reason: l.end.unwrap_or(FinishReason::Length),
                experts: l.experts,
            };
            deliver(l.place, completion)?;
        }
        self.batch.progress.advance(drawn - live.len(), drawn);
        Ok(())
    }
}

impl Live {
    /// Adds a token.
    fn add(
        &mut self,
        drawn: DrawnToken,
        sampling: &SamplingConfig,
        stop_strings: Option<&StopStrings<'_>>,
    ) -> Result<()> {
        let token = drawn.token;
        self.log_probs.push(drawn.log_prob);
        self.drawn_log_probs.push(drawn.drawn_log_prob);
        self.tokens.push(token);
        let at_string = match stop_strings {
            Some(stop_strings) => stop_strings.end(&self.tokens)?,
            None => false,
        };
        self.end = if sampling.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken)
        } else if at_string {
            Some(FinishReason::StopString)
        } else if self.tokens.len() == self.max_new_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        Ok(())
    }
}

/// Returns the error for logits `[V]` from which no token can be sampled.
fn no_token(logits: &Tensor) -> Result<()> {
    let logits = logits.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let invalid = logits
        .iter()
        .position(|x| x.is_nan() || *x == f32::INFINITY);
    let Some(token) = invalid else {
        anyhow::bail!("no token has a logit above -inf");
    };
    let logit = format!("the logit of token {token} ({})", logits[token]);
    Err(NotFinite::with_consequence(logit, "no token can be drawn").into())
}
