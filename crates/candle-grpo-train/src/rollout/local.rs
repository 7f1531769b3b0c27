//! A generator in this process.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_kernels::{Draw, DrawnToken, draw_tokens};
use candle_grpo_nn::{
    ComputeCopies, ComputeDType, Decoder, DecoderConfig, Decoding, LanguageModel, Lora,
    MergedCopies, ModelConfig, PagedCache, Parameters, SequenceId,
};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::engine_kind::Engine;
use super::generator::{CompletionSeed, Deliver, GenerationBatch, Generator, PolicyWeights};
use super::stop_strings::StopStrings;
use super::{Completion, FinishReason, SamplingConfig};
use crate::bisection::largest;
use crate::detached::model_in;
use crate::random::uniform;
use crate::{Interrupted, NotFinite, Progress};

/// When completions start, the cache reserves room for this many tokens of each one.
const RESERVED_TOKENS: usize = 64;

/// After this many steps, the CPU samples from weight copies ([`Decoding::pack_weights`]). Copying
/// pays off within 3 to 10 steps, or within several times as many if the system must first provide
/// the memory.
pub(crate) const STEPS_BEFORE_PACKING: usize = 16;

/// Returns about how many tokens of prompts a forward pass has. The launches of a pass take a GPU
/// about 100 microseconds per layer, in which it could multiply thousands of rows.
pub(crate) fn prefill_tokens(on_cuda: bool) -> usize {
    if on_cuda { 8192 } else { 512 }
}

/// Samples completions from a model that shares the policy's parameters: after an optimizer step,
/// it samples from the new policy. [`Self::in_dtype`], [`Self::detached`] and [`Self::merged`]
/// sample from copies.
///
/// The model is a decoder, or a custom one with the configuration `C`. For a custom model,
/// [`LanguageModel::decoding`] computes the logits, and everything else is the same.
///
/// On the CPU, a decoder's tokens and log-probs are bit-identical for any batch, order and number
/// of threads.
///
/// Each distinct prompt is computed once, and its completions share its keys and values. When a
/// completion ends, it leaves the batch, and the next one takes its place.
///
/// A decoder's completions start only if their keys and values fit into memory
/// ([`SamplingConfig::max_cache_mib`], or what the device has). If memory runs out later, those
/// that started last are suspended: they give up their keys and values, which are computed again
/// when there is room. On the CPU, this does not change a bit.
pub struct LocalGenerator<C: ModelConfig = DecoderConfig> {
    config: C,
    model: C::Model,
    device: Device,
    /// The weight version.
    version: AtomicU64,
    weights: Weights,
    /// True if steps on a GPU are recorded.
    records_steps: bool,
    /// The recorded steps of earlier calls.
    cache: Mutex<Option<PagedCache>>,
}

/// The relation of the model's weights to those of the policy.
enum Weights {
    /// They are the same, or copies in another dtype.
    Shared(ComputeCopies),
    /// A copy of those that train, and its copies in another dtype.
    Detached(Parameters, ComputeCopies),
    /// Copies in which the adapters are merged.
    Merged(MergedCopies),
}

/// One call to [`Generator::generate`].
struct Run<'a> {
    decoding: Box<dyn Decoding + 'a>,
    batch: &'a GenerationBatch<'a>,
    /// Index of each prompt's adapters. Empty: all have the first.
    adapters: &'a [usize],
    stop_strings: Option<StopStrings<'a>>,
    version: u64,
    prefill_tokens: usize,
    prompts: Vec<PromptState<'a>>,
    /// Why the device had no more memory, if it had not.
    out_of_memory: Option<candle_core::Error>,
}

/// A distinct prompt in a call.
struct PromptState<'a> {
    tokens: &'a [u32],
    /// Index of its adapters.
    adapter: usize,
    /// Number of completions that have no sequence.
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

/// A completion that has not ended. All vectors have an entry for each token, except the experts.
struct Live {
    place: usize,
    /// Index of its prompt.
    prompt: usize,
    seed: CompletionSeed,
    max_new_tokens: usize,
    /// Its sequence, which has all its tokens but the last one. `None` before it starts, and while
    /// it is suspended.
    sequence: Option<SequenceId>,
    random: ChaCha8Rng,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    drawn_log_probs: Vec<f32>,
    weight_versions: Vec<u64>,
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
        let built = built.gathering(parameters)?;
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
            weights: Weights::Shared(ComputeCopies::default()),
            records_steps: false,
            cache: Mutex::default(),
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
            weights: Weights::Shared(copies),
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
            weights: Weights::Detached(trained, copies),
            ..Self::from_model(weights.model.clone(), model)
        })
    }

    /// Creates a generator that merges the adapters of `weights` into copies of the weights that
    /// they extend, and computes in `dtype`. A token then takes one product per map, as without
    /// adapters. It samples from the copies until [`Generator::weights_changed`] merges other
    /// adapters into them, so the policy can train on another thread. The other parameters are
    /// shared if they have this dtype.
    ///
    /// The merged weights are rounded, so on the CPU, too, log-probs differ from those in the
    /// training pass. In bf16 and f16, rounding loses changes to a weight that are smaller than
    /// half the distance between two numbers.
    ///
    /// # Errors
    ///
    /// Fails if `weights` have no adapters, or not their model's shape.
    pub fn merged(weights: &PolicyWeights<'_, C>, dtype: ComputeDType) -> Result<Self> {
        let parameters = weights.parameters;
        let (vb, copies) = adapters_of(weights)?.merged_var_builder(parameters, dtype.into())?;
        let model = weights.model.build(vb)?;
        Ok(Self {
            version: AtomicU64::new(weights.version),
            weights: Weights::Merged(copies),
            ..Self::from_model(weights.model.clone(), model)
        })
    }

    /// Sets whether steps on a GPU are recorded, which is several times as fast for small models
    /// ([`Decoding::record_steps`]). By default, they are not.
    ///
    /// Later calls use the recordings again. Between calls, they take the driver's memory for
    /// graphs, and there is none for keys and values. If a call fails, its recordings are
    /// discarded.
    ///
    /// **No other thread may use the GPU** while a generator with recorded steps generates.
    #[must_use]
    pub fn with_recorded_steps(self, records_steps: bool) -> Self {
        Self {
            records_steps,
            cache: Mutex::default(),
            ..self
        }
    }

    /// Returns the model that the generator samples from.
    pub fn model(&self) -> &C::Model {
        &self.model
    }

    /// Samples like [`Generator::generate`] from a generator for a [joined
    /// decoder](Decoder::joined). `adapters` has one index per prompt in `batch`, that of the
    /// decoder to sample its completions from. On the CPU, they are bit-identical to those from
    /// that decoder alone.
    ///
    /// # Errors
    ///
    /// Same as [`Generator::generate`]. Also if `adapters` has another length, or an index that the
    /// model does not have.
    pub fn generate_joined(
        &self,
        batch: &GenerationBatch<'_>,
        adapters: &[usize],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        ensure!(
            adapters.len() == batch.prompts.len(),
            "adapters: {}, must be {}, one for each prompt",
            adapters.len(),
            batch.prompts.len()
        );
        self.run(batch, adapters, deliver)
    }

    fn run(
        &self,
        batch: &GenerationBatch<'_>,
        adapters: &[usize],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check(batch)?;
        let mut run = Run {
            decoding: self.decoding()?,
            batch,
            adapters,
            stop_strings: StopStrings::new(batch)?,
            version: self.version.load(Ordering::Acquire),
            prefill_tokens: prefill_tokens(self.device.is_cuda()),
            prompts: Vec::new(),
            out_of_memory: None,
        };
        if let Some(mib) = batch.sampling.max_cache_mib {
            let limit = run.decoding.limit_memory(mib.saturating_mul(1 << 20));
            limit.with_context(|| format!("max_cache_mib: {mib}, must be absent"))?;
        }
        if self.device.is_cpu() {
            // A thread from rayon's pool drives the model, so the pool does not have to be woken
            // for each operator.
            return rayon::join(|| run.run(deliver), || ()).0;
        }
        // A GPU may have a stream for each thread. On another thread, weights might be read before
        // they are written.
        run.run(deliver)?;
        *self.cache() = run.decoding.into_empty_cache();
        Ok(())
    }

    /// The empty cache of earlier calls.
    fn cache(&self) -> MutexGuard<'_, Option<PagedCache>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decoding(&self) -> Result<Box<dyn Decoding + '_>> {
        let cache = self.cache().take();
        let mut decoding = match cache {
            Some(cache) => self.model.decoding_with(cache)?,
            None => self.model.decoding()?,
        };
        if self.records_steps {
            decoding.record_steps();
        }
        Ok(decoding)
    }

    fn check(&self, batch: &GenerationBatch<'_>) -> Result<()> {
        batch.sampling.validate()?;
        Engine::Local.validate_sampling(batch.sampling)?;
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
        let Some(partial) = batch.partial else {
            return Ok(());
        };
        partial.validate(batch.prompts, vocabulary)?;
        for (place, begun) in partial.begun.iter().enumerate() {
            ensure!(
                begun.as_ref().is_none_or(|begun| begun.log_probs.is_some()),
                "begun[{place}]: no log_probs, must have them"
            );
        }
        Ok(())
    }
}

impl<C: ModelConfig> Generator<C> for LocalGenerator<C> {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.run(batch, &[], deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_, C>, _: &dyn Progress) -> Result<()> {
        match &self.weights {
            Weights::Shared(copies) => copies.refresh()?,
            Weights::Detached(trained, copies) => {
                let new = weights
                    .adapters
                    .map_or(weights.parameters, Lora::parameters);
                let new = new.iter();
                let new = new.map(|(name, value)| (name.to_owned(), value.as_detached_tensor()));
                trained.set_values(&new.collect())?;
                copies.refresh()?;
            }
            Weights::Merged(copies) => copies.refresh(adapters_of(weights)?, weights.parameters)?,
        }
        self.version.store(weights.version, Ordering::Release);
        Ok(())
    }

    fn shares_weights(&self) -> bool {
        matches!(self.weights, Weights::Shared(_))
    }
}

/// Returns the adapters to merge.
fn adapters_of<'a, C>(weights: &PolicyWeights<'a, C>) -> Result<&'a Lora> {
    let adapters = weights.adapters;
    adapters.context("adapters: absent, must be given, as they are merged into the weights")
}

impl Run<'_> {
    fn run(&mut self, deliver: &mut Deliver<'_>) -> Result<()> {
        let mut waiting = self.plan();
        // In order of their places, as those that wait.
        let mut live: Vec<Live> = Vec::new();
        let mut steps = 0;
        loop {
            if self.batch.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            if let Some(partial) = self.batch.partial
                && (partial.is_enough)()
            {
                let left = live.into_iter().chain(waiting);
                let mut left = left.filter(|l| !l.tokens.is_empty());
                return left.try_for_each(|l| (partial.unfinished)(l.place, l.into_completion()));
            }
            if !live.is_empty() {
                if steps == STEPS_BEFORE_PACKING {
                    self.decoding.pack_weights();
                }
                steps += 1;
                while !self.has_room(&room(&live, 1)) {
                    self.suspend(&mut live, &mut waiting)?;
                }
                let new = last_tokens(&live)?;
                let (logits, experts) = self.next(&new)?;
                for (l, experts) in live.iter_mut().zip(experts) {
                    l.experts.get_or_insert_default().extend(experts);
                }
                let rows: Vec<usize> = (0..live.len()).collect();
                self.draw(&logits, &rows, &mut live)?;
                self.finish(&mut live, deliver)?;
            }
            let count = self.admissible(&waiting, &live)?;
            if count > 0 {
                let (mut resumed, begun): (Vec<_>, Vec<_>) =
                    waiting.drain(..count).partition(|l| !l.tokens.is_empty());
                self.give_sequences(&mut resumed)?;
                self.resume(&resumed)?;
                live.append(&mut resumed);
                self.begin(begun, &mut live, deliver)?;
            } else if live.is_empty() {
                return Ok(());
            }
        }
    }

    /// Finds the distinct prompts, and lists all completions in order.
    fn plan(&mut self) -> VecDeque<Live> {
        let mut state_of = HashMap::new();
        let mut waiting = VecDeque::new();
        for (at, request) in self.batch.prompts.iter().enumerate() {
            let adapter = self.adapters.get(at).copied().unwrap_or_default();
            let key = (request.tokens, adapter);
            let prompt = *state_of.entry(key).or_insert_with(|| {
                self.prompts.push(PromptState {
                    tokens: request.tokens,
                    adapter,
                    waiting: 0,
                    computed: None,
                });
                self.prompts.len() - 1
            });
            self.prompts[prompt].waiting += request.seeds.len();
            for &seed in &request.seeds {
                let place = waiting.len();
                let begun = self.batch.partial.and_then(|p| p.begun.get(place)?.clone());
                let mut l = Live {
                    place,
                    prompt,
                    seed,
                    max_new_tokens: request.max_new_tokens,
                    sequence: None,
                    random: seed.random(),
                    tokens: Vec::new(),
                    log_probs: Vec::new(),
                    drawn_log_probs: Vec::new(),
                    weight_versions: Vec::new(),
                    experts: None,
                    end: None,
                };
                if let Some(begun) = begun {
                    l.begin_with(begun, self.batch.sampling);
                }
                waiting.push_back(l);
            }
        }
        waiting
    }

    /// Reserves memory, see [`Decoding::reserve`]. Returns false if there is not enough.
    fn has_room(&mut self, tokens: &[(Option<SequenceId>, usize)]) -> bool {
        self.decoding.reserve(tokens).unwrap_or_else(|error| {
            self.out_of_memory = Some(error);
            false
        })
    }

    /// Returns how many of the first completions in `waiting` start now, and reserves memory for
    /// them and for the next tokens of those that are `live`.
    fn admissible(&mut self, waiting: &VecDeque<Live>, live: &[Live]) -> Result<usize> {
        let places = self.batch.sampling.max_batch_size - live.len();
        let most = places.min(waiting.len());
        if most == 0 {
            return Ok(0);
        }
        let mut fits =
            |count| Ok(self.has_room(&self.needed(waiting, live, count, RESERVED_TOKENS)));
        // All of them together, so that the cache grows once.
        if fits(most)? {
            return Ok(most);
        }
        let fitting = largest(1, most - 1, fits)?;
        if fitting.is_some() || !live.is_empty() {
            return Ok(fitting.unwrap_or_default());
        }
        // Only prompts are in memory.
        while self.drop_prompt()? {}
        if self.has_room(&self.needed(waiting, live, 1, 1)) {
            return Ok(1);
        }
        Err(self.no_room(&waiting[0]))
    }

    /// Returns the entries for [`Decoding::reserve`] for the first `count` completions in
    /// `waiting`, with their prompts and `more` new tokens, and those of the `live` ones.
    fn needed(
        &self,
        waiting: &VecDeque<Live>,
        live: &[Live],
        count: usize,
        more: usize,
    ) -> Vec<(Option<SequenceId>, usize)> {
        let mut entries = room(live, more);
        let prompts = self.uncomputed(waiting.iter().take(count));
        let lengths = prompts
            .iter()
            .map(|&prompt| self.prompts[prompt].tokens.len());
        entries.extend(lengths.map(|length| (None, length)));
        // The last token is not in the sequence.
        let begun = waiting.iter().take(count);
        entries.extend(begun.map(|l| (None, l.tokens.len() + l.more(more) - 1)));
        entries
    }

    /// Returns the distinct prompts of completions without results, in order.
    fn uncomputed<'l>(&self, completions: impl Iterator<Item = &'l Live>) -> Vec<usize> {
        let prompts = completions.map(|l| l.prompt);
        let mut prompts: Vec<usize> = prompts
            .filter(|&prompt| self.prompts[prompt].computed.is_none())
            .collect();
        prompts.sort_unstable();
        prompts.dedup();
        prompts
    }

    /// Returns the error for a completion that does not fit into memory alone.
    fn no_room(&mut self, l: &Live) -> anyhow::Error {
        let (prompt, tokens) = (self.prompts[l.prompt].tokens.len(), l.tokens.len() + 1);
        let what = format!("a prompt with {prompt} tokens and a completion with {tokens}");
        match (self.out_of_memory.take(), self.batch.sampling.max_cache_mib) {
            (Some(error), _) => anyhow::Error::from(error).context(format!(
                "not enough memory for the keys and values of {what}"
            )),
            (None, mib) => anyhow::anyhow!(
                "max_cache_mib: {}, must have room for the keys and values of {what}",
                mib.unwrap_or_default()
            ),
        }
    }

    /// Suspends the completion that started last. If there is no other one, drops a prompt instead.
    fn suspend(&mut self, live: &mut Vec<Live>, waiting: &mut VecDeque<Live>) -> Result<()> {
        if let [last] = live.as_slice() {
            ensure!(self.drop_prompt()?, self.no_room(last));
            return Ok(());
        }
        if let Some(mut last) = live.pop() {
            self.decoding.remove(last.sequence()?)?;
            last.sequence = None;
            self.prompts[last.prompt].waiting += 1;
            waiting.push_front(last);
        }
        Ok(())
    }

    /// Removes the results of a prompt, which are computed again when a completion needs them.
    /// Returns false if there are none.
    fn drop_prompt(&mut self) -> Result<bool> {
        let computed = self
            .prompts
            .iter_mut()
            .find_map(|state| state.computed.take());
        if let Some(computed) = &computed {
            self.decoding.remove(computed.sequence)?;
        }
        Ok(computed.is_some())
    }

    /// Computes the prompts of completions without a sequence, and gives each one its sequence.
    fn give_sequences(&mut self, completions: &mut [Live]) -> Result<()> {
        let mut pass: Vec<usize> = Vec::new();
        let mut tokens = 0;
        for prompt in self.uncomputed(completions.iter()) {
            pass.push(prompt);
            tokens += self.prompts[prompt].tokens.len();
            if tokens >= self.prefill_tokens {
                self.prefill(&pass)?;
                pass.clear();
                tokens = 0;
            }
        }
        self.prefill(&pass)?;
        for l in completions {
            let sequence = self.computed(l.prompt)?.sequence;
            l.sequence = Some(self.decoding.fork(sequence)?);
        }
        Ok(())
    }

    fn computed(&self, prompt: usize) -> Result<&Computed> {
        let computed = self.prompts[prompt].computed.as_ref();
        computed.context("a prompt was not computed")
    }

    /// Counts completions that have a sequence, and removes prompts that no other one waits for.
    fn leave_prompts(&mut self, completions: &[Live]) -> Result<()> {
        for l in completions {
            let state = &mut self.prompts[l.prompt];
            state.waiting -= 1;
            if state.waiting == 0
                && let Some(computed) = state.computed.take()
            {
                self.decoding.remove(computed.sequence)?;
            }
        }
        Ok(())
    }

    /// Computes the keys and values of completions that were suspended, in passes with at most
    /// [`prefill_tokens`] tokens.
    fn resume(&mut self, completions: &[Live]) -> Result<()> {
        self.leave_prompts(completions)?;
        let mut pass: Vec<(SequenceId, &[u32])> = Vec::new();
        let mut tokens = 0;
        for l in completions {
            for part in l.tokens[..l.tokens.len() - 1].chunks(self.prefill_tokens) {
                if tokens + part.len() > self.prefill_tokens {
                    self.decoding.next_logits(&pass)?;
                    pass.clear();
                    tokens = 0;
                }
                pass.push((l.sequence()?, part));
                tokens += part.len();
            }
        }
        if !pass.is_empty() {
            self.decoding.next_logits(&pass)?;
        }
        Ok(())
    }

    /// Samples the first tokens of completions, and adds them to the `live` ones.
    fn begin(
        &mut self,
        mut begun: Vec<Live>,
        live: &mut Vec<Live>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        if begun.is_empty() {
            return Ok(());
        }
        self.give_sequences(&mut begun)?;
        let mut logits = Vec::new();
        let mut row_of = HashMap::new();
        let mut rows = Vec::with_capacity(begun.len());
        for l in &mut begun {
            let computed = self.computed(l.prompt)?;
            l.experts.clone_from(&computed.experts);
            rows.push(*row_of.entry(l.prompt).or_insert_with(|| {
                logits.push(computed.logits.clone());
                logits.len() - 1
            }));
        }
        self.leave_prompts(&begun)?;
        self.draw(&Tensor::cat(&logits, 0)?, &rows, &mut begun)?;
        self.finish(&mut begun, deliver)?;
        live.append(&mut begun);
        Ok(())
    }

    /// Computes the prompts' keys and values, and the logits after them.
    fn prefill(&mut self, prompts: &[usize]) -> Result<()> {
        if prompts.is_empty() {
            return Ok(());
        }
        let mut new: Vec<(SequenceId, &[u32])> = Vec::with_capacity(prompts.len());
        for &prompt in prompts {
            let state = &self.prompts[prompt];
            let sequence = self.decoding.add_with_adapter(state.adapter)?;
            new.push((sequence, state.tokens));
        }
        let (logits, experts) = self.next(&new)?;
        let mut experts = experts.into_iter();
        for (row, (&prompt, (sequence, _))) in prompts.iter().zip(new).enumerate() {
            self.prompts[prompt].computed = Some(Computed {
                sequence,
                logits: logits.narrow(0, row, 1)?,
                experts: experts.next(),
            });
        }
        Ok(())
    }

    /// Computes the logits after the new tokens. Also returns the experts for each sequence in
    /// `new`: none, unless they are recorded.
    fn next(&mut self, new: &[(SequenceId, &[u32])]) -> Result<(Tensor, Vec<Vec<u16>>)> {
        if !self.batch.records_experts {
            return Ok((self.decoding.next_logits(new)?, Vec::new()));
        }
        let (logits, experts) = self.decoding.next_logits_and_experts(new)?;
        let Some(experts) = experts else {
            return Ok((logits, Vec::new()));
        };
        let choices = experts.dim(1)?;
        let experts = experts.flatten_all()?.to_vec1::<u32>()?;
        let mut rest = experts.into_iter().map(|expert| expert as u16);
        let parts = new
            .iter()
            .map(|(_, tokens)| rest.by_ref().take(tokens.len() * choices).collect());
        Ok((logits, parts.collect()))
    }

    /// Samples each completion's next token, from its row in `logits`.
    fn draw(&self, logits: &Tensor, rows: &[usize], live: &mut [Live]) -> Result<()> {
        let (sampling, stop_strings) = (self.batch.sampling, self.stop_strings.as_ref());
        let version = self.version;
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
                    Some(drawn) => l.add(drawn, version, sampling, stop_strings),
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
            self.decoding.remove(l.sequence()?)?;
            deliver(l.place, l.into_completion())?;
        }
        self.batch.progress.advance(drawn - live.len(), drawn);
        Ok(())
    }
}

/// Returns the entries for [`Decoding::reserve`] for at most `more` new tokens of each completion.
fn room(live: &[Live], more: usize) -> Vec<(Option<SequenceId>, usize)> {
    // The last token is not in the sequence, and the very last one never will be.
    live.iter().map(|l| (l.sequence, l.more(more))).collect()
}

/// Returns each completion's sequence, with its last token.
fn last_tokens(live: &[Live]) -> Result<Vec<(SequenceId, &[u32])>> {
    let new = live.iter();
    new.map(|l| Ok((l.sequence()?, &l.tokens[l.tokens.len() - 1..])))
        .collect()
}

impl Live {
    fn sequence(&self) -> Result<SequenceId> {
        self.sequence.context("a completion has no sequence")
    }

    /// Starts with the tokens of an earlier call, and with the random numbers after theirs.
    fn begin_with(&mut self, begun: Completion, sampling: &SamplingConfig) {
        if !sampling.greedy {
            for _ in &begun.tokens {
                uniform(&mut self.random);
            }
        }
        self.log_probs = begun.log_probs.unwrap_or_default();
        self.tokens = begun.tokens;
        self.drawn_log_probs = begun.drawn_log_probs;
        self.weight_versions = begun.weight_versions;
        self.experts = begun.experts;
    }

    fn into_completion(self) -> Completion {
        Completion {
            tokens: self.tokens,
            drawn_log_probs: self.drawn_log_probs,
            log_probs: Some(self.log_probs),
            written: None,
            weight_versions: self.weight_versions,
            finish_reason: self.end.unwrap_or(FinishReason::Length),
            experts: self.experts,
        }
    }

    /// Returns how many of at most `most` more tokens it may have.
    fn more(&self, most: usize) -> usize {
        most.min(self.max_new_tokens - self.tokens.len())
    }

    /// Adds a token.
    fn add(
        &mut self,
        drawn: DrawnToken,
        version: u64,
        sampling: &SamplingConfig,
        stop_strings: Option<&StopStrings<'_>>,
    ) -> Result<()> {
        let token = drawn.token;
        self.log_probs.push(drawn.log_prob);
        self.drawn_log_probs.push(drawn.drawn_log_prob);
        self.tokens.push(token);
        self.weight_versions.push(version);
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
