//! Samples completions for prompts from any generator.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use candle_grpo_core::validate::at_least_one;
use candle_grpo_nn::{DecoderConfig, Held, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use crate::ranks::Ranks;
use crate::rollout::decode::decode_tokens;
use crate::rollout::{
    CompletionSeed, CompletionState, DecodeText, GenerationBatch, Generator, LocalGenerator,
    Partial, Play, PromptRequest, Trajectories, UnfinishedGroup,
};
use crate::{Completion, Progress, Prompt, Rollout, SamplingConfig};
use candle_grpo_base::progress::NoProgress;

/// Samples completions for prompts from a [`Generator`], with one configuration.
///
/// A completion's seed consists of the configured seed, the `stream`, its prompt's index, and its
/// number among that prompt's completions. If a prompt occurs again in a batch, the number keeps
/// counting, so that no two of its completions have the same seed.
pub struct Sampler<C = DecoderConfig> {
    generator: Arc<dyn Generator<C>>,
    vocab_size: usize,
    config: SamplingConfig,
    decode: Option<Arc<DecodeText>>,
    progress: Arc<dyn Progress>,
    ranks: Ranks,
    records_experts: bool,
    environments: Option<Arc<dyn Trajectories>>,
    /// The weights that it samples from, if ranks divide them.
    held: Option<Arc<Held>>,
}

impl<C> Clone for Sampler<C> {
    fn clone(&self) -> Self {
        Self {
            generator: Arc::clone(&self.generator),
            vocab_size: self.vocab_size,
            config: self.config.clone(),
            decode: self.decode.clone(),
            progress: Arc::clone(&self.progress),
            ranks: self.ranks.clone(),
            records_experts: self.records_experts,
            environments: self.environments.clone(),
            held: self.held.clone(),
        }
    }
}

impl<C: ModelConfig> Sampler<C> {
    /// Creates a sampler for the policy `parameters` with shape `model`, using a
    /// [`LocalGenerator`].
    ///
    /// # Errors
    ///
    /// If `config` is invalid or `parameters` do not have this shape.
    pub fn new(model: &C, parameters: &Parameters, config: SamplingConfig) -> Result<Self> {
        let generator = LocalGenerator::new(model, parameters)?;
        Self::from_generator(Arc::new(generator), model.vocab_size(), config)
    }

    /// Creates a sampler for any generator, whose tokens must be below `vocab_size`.
    ///
    /// # Errors
    ///
    /// If `config` is invalid.
    pub fn from_generator(
        generator: Arc<dyn Generator<C>>,
        vocab_size: usize,
        config: SamplingConfig,
    ) -> Result<Self> {
        config.validate_for(vocab_size)?;
        Ok(Self {
            generator,
            vocab_size,
            config,
            decode: None,
            progress: Arc::new(NoProgress),
            ranks: Ranks::default(),
            records_experts: false,
            environments: None,
            held: None,
        })
    }

    /// Sets the function that converts tokens to text, in which the generator searches for stop
    /// strings. Several threads call it with a completion's last tokens.
    #[must_use]
    pub fn with_text_decoder(
        mut self,
        decode: impl Fn(&[u32]) -> Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.decode = Some(Arc::new(decode));
        self
    }

    /// Like [`Self::with_text_decoder`], with `tokenizer`. Special tokens are kept, since a stop
    /// string may be or contain one.
    #[must_use]
    pub fn with_tokenizer(self, tokenizer: &Tokenizer) -> Self {
        let tokenizer = tokenizer.clone();
        self.with_text_decoder(move |tokens| decode_tokens(tokens, &tokenizer))
    }

    /// Sets the receiver of progress, which can also cancel sampling.
    #[must_use]
    pub fn with_progress(mut self, progress: Arc<dyn Progress>) -> Self {
        self.progress = progress;
        self
    }

    /// Sets whether to record [`Completion::experts`], for training that replays them.
    #[must_use]
    pub fn with_experts(self, records_experts: bool) -> Self {
        Self {
            records_experts,
            ..self
        }
    }

    /// Draws trajectories of several turns, in place of single completions.
    #[must_use]
    pub fn with_environments(self, environments: Arc<dyn Trajectories>) -> Self {
        Self {
            environments: Some(environments),
            ..self
        }
    }

    /// Replaces the generator.
    #[must_use]
    pub fn with_generator(self, generator: Arc<dyn Generator<C>>) -> Self {
        Self { generator, ..self }
    }

    /// Replaces the configuration.
    ///
    /// # Errors
    ///
    /// If `config` is invalid.
    pub fn with_config(self, config: SamplingConfig) -> Result<Self> {
        config.validate_for(self.vocab_size)?;
        Ok(Self { config, ..self })
    }

    /// Holds the weights that it samples from.
    pub(crate) fn holding(self, held: Option<Held>) -> Self {
        Self {
            held: held.map(Arc::new),
            ..self
        }
    }

    /// Divides the prompts between the ranks, see [`Self::share`].
    pub(crate) fn with_ranks(self, ranks: Ranks) -> Self {
        Self { ranks, ..self }
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The part of `prompts` prompts for which this rank samples completions.
    pub(crate) fn share(&self, prompts: usize) -> Range<usize> {
        match (self.generator.serves_all_ranks(), self.ranks.is_first()) {
            (true, true) => 0..prompts,
            (true, false) => 0..0,
            (false, _) => self.ranks.share(prompts),
        }
    }

    /// Returns whether this rank's generator receives the policy weights.
    pub(crate) fn takes_weights(&self) -> bool {
        !self.generator.serves_all_ranks() || self.ranks.is_first()
    }

    /// The configuration.
    pub fn config(&self) -> &SamplingConfig {
        &self.config
    }

    /// The generator.
    pub fn generator(&self) -> &Arc<dyn Generator<C>> {
        &self.generator
    }

    /// Samples `num_generations` completions per prompt; those for one prompt are adjacent.
    ///
    /// `stream` separates calls that otherwise have the same seed, for example in different
    /// training steps.
    ///
    /// # Errors
    ///
    /// If there are no prompts, `num_generations` is 0, the generator fails, or a completion is
    /// invalid. [`Interrupted`](crate::Interrupted) if the progress cancels.
    pub fn sample(
        &self,
        prompts: &[&Prompt],
        num_generations: usize,
        stream: u64,
    ) -> Result<Vec<Rollout>> {
        self.sample_part(prompts, num_generations, stream, 0..prompts.len())
    }

    /// The completions that [`Self::sample`] returns for the prompts in `part`, bit-identical.
    ///
    /// # Errors
    ///
    /// Same as [`Self::sample`]. Also if `part` is empty or out of range.
    pub(crate) fn sample_part(
        &self,
        prompts: &[&Prompt],
        num_generations: usize,
        stream: u64,
        part: Range<usize>,
    ) -> Result<Vec<Rollout>> {
        at_least_one("num_generations", num_generations)?;
        ensure!(
            !prompts.is_empty(),
            "prompts: none, there must be at least one"
        );
        ensure!(
            prompts.len().saturating_mul(num_generations) <= u32::MAX as usize,
            "num_generations: {num_generations} for each of {} prompts, must be fewer than 2^32 in all",
            prompts.len()
        );
        let requests = self.requests(prompts, num_generations, stream);
        let (Some(prompts), Some(requests)) = (prompts.get(part.clone()), requests.get(part))
        else {
            anyhow::bail!("part: out of range of {} prompts", prompts.len());
        };
        if let Some(environments) = &self.environments {
            let progress = TokensOnly(&*self.progress);
            return environments.play(&Play {
                prompts,
                requests,
                vocab_size: self.vocab_size,
                sampling: &self.config,
                draw: &|turns, stop_strings| self.draw(turns, stop_strings, &progress),
                progress: &*self.progress,
            });
        }
        let completions = self.draw(requests, &[], &*self.progress)?;
        let seeds = requests.iter().flat_map(|request| &request.seeds);
        let rollouts = completions.into_iter().zip(seeds).enumerate();
        let rollout = |(place, (completion, &seed)): (usize, (Completion, _))| {
            Rollout::single(seed, prompts[place / num_generations], completion)
        };
        Ok(rollouts.map(rollout).collect())
    }

    /// Starts groups of `num_generations` completions without tokens for the prompts at `rows` of
    /// `prompts`, in the step `step`. Their seeds are those of [`Self::sample`].
    pub(crate) fn start_groups(
        &self,
        prompts: &[Prompt],
        rows: &[usize],
        num_generations: usize,
        (step, stream): (usize, u64),
    ) -> Vec<UnfinishedGroup> {
        let started: Vec<&Prompt> = rows.iter().map(|&row| &prompts[row]).collect();
        let requests = self.requests(&started, num_generations, stream);
        let groups = rows.iter().zip(&requests);
        groups
            .map(|(&row, request)| UnfinishedGroup::new(row, step, &request.seeds))
            .collect()
    }

    /// Continues groups until `needed` of them are whole, and all that started in the step `oldest`
    /// or before it. Their prompts are in `prompts`. Returns false if `interrupted` has ended it
    /// before.
    ///
    /// # Errors
    ///
    /// Same as [`Self::sample`].
    pub(crate) fn continue_groups(
        &self,
        prompts: &[Prompt],
        groups: &mut [UnfinishedGroup],
        needed: usize,
        oldest: usize,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<bool> {
        let mut left: Vec<usize> = groups.iter().map(UnfinishedGroup::count_left).collect();
        let whole = left.iter().filter(|left| **left == 0).count();
        let mut missing = needed.saturating_sub(whole);
        let is_old = |group: &UnfinishedGroup| group.step <= oldest;
        let old = groups.iter().zip(&left);
        let mut old_left = old
            .filter(|(group, left)| is_old(group) && **left > 0)
            .count();
        if missing == 0 && old_left == 0 {
            return Ok(true);
        }
        // The group and the number of each completion to sample.
        let mut places = Vec::new();
        let (mut requests, mut begun) = (Vec::new(), Vec::new());
        for (at, group) in groups.iter_mut().enumerate() {
            let mut seeds = Vec::new();
            for (number, completion) in group.completions.iter_mut().enumerate() {
                begun.push(match std::mem::take(&mut completion.state) {
                    ended @ CompletionState::Ended(_) => {
                        completion.state = ended;
                        continue;
                    }
                    CompletionState::Begun(begun) => Some(begun),
                    CompletionState::New => None,
                });
                places.push((at, number));
                seeds.push(completion.seed);
            }
            if !seeds.is_empty() {
                requests.push(PromptRequest {
                    tokens: &prompts[group.row].tokens,
                    seeds,
                    max_new_tokens: self.config.max_new_tokens,
                });
            }
        }
        let has_enough = AtomicBool::new(false);
        let unfinished = Mutex::new(Vec::new());
        let partial = Partial {
            begun: &begun,
            is_enough: &|| has_enough.load(Ordering::Acquire) || interrupted(),
            unfinished: &|place, completion| {
                let mut unfinished = unfinished.lock().unwrap_or_else(PoisonError::into_inner);
                unfinished.push((place, completion));
                Ok(())
            },
        };
        let seeds = seeds(&requests);
        let batch = self.batch(&requests, &self.config, &*self.progress);
        let batch = GenerationBatch {
            partial: Some(partial),
            ..batch
        };
        self.generate(&batch, &seeds, &mut |place, ended| {
            let (at, number) = places[place];
            groups[at].completions[number].state = CompletionState::Ended(ended);
            left[at] -= 1;
            if left[at] == 0 {
                missing = missing.saturating_sub(1);
                old_left -= usize::from(is_old(&groups[at]));
            }
            has_enough.store(missing == 0 && old_left == 0, Ordering::Release);
        })?;
        let has_enough = has_enough.into_inner();
        ensure!(
            has_enough || interrupted(),
            "generator: ended before enough completions had ended"
        );
        let unfinished = unfinished.into_inner();
        for (place, completion) in unfinished.unwrap_or_else(PoisonError::into_inner) {
            let Some(slot) = begun.get_mut(place) else {
                anyhow::bail!(
                    "generator: delivered unfinished completion {place}, must be below {}",
                    places.len()
                );
            };
            let valid = completion.validate(self.vocab_size);
            valid.with_context(|| format!("generator: unfinished {}", name(seeds[place])))?;
            *slot = Some(completion);
        }
        for ((at, number), begun) in places.into_iter().zip(begun) {
            let completion = &mut groups[at].completions[number];
            if let Some(begun) = begun
                && !completion.has_ended()
            {
                completion.state = CompletionState::Begun(begun);
            }
        }
        Ok(has_enough)
    }

    /// The source of trajectories, if there is one.
    pub(crate) fn environments(&self) -> Option<&Arc<dyn Trajectories>> {
        self.environments.as_ref()
    }

    /// Draws the completions of `requests` in their order. They end at `stop_strings`, too.
    fn draw(
        &self,
        requests: &[PromptRequest<'_>],
        stop_strings: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<Completion>> {
        let mut sampling = Cow::Borrowed(&self.config);
        if !stop_strings.is_empty() {
            sampling
                .to_mut()
                .stop_strings
                .extend_from_slice(stop_strings);
            sampling.validate()?;
        }
        let seeds = seeds(requests);
        let mut completions: Vec<Option<Completion>> = vec![None; seeds.len()];
        let batch = self.batch(requests, &sampling, progress);
        self.generate(&batch, &seeds, &mut |place, found| {
            completions[place] = Some(found);
        })?;
        completions
            .into_iter()
            .zip(seeds)
            .map(|(completion, seed)| {
                completion.with_context(|| format!("generator: {} is missing", name(seed)))
            })
            .collect()
    }

    fn batch<'a>(
        &'a self,
        prompts: &'a [PromptRequest<'a>],
        sampling: &'a SamplingConfig,
        progress: &'a dyn Progress,
    ) -> GenerationBatch<'a> {
        GenerationBatch {
            prompts,
            sampling,
            decode: self.decode.as_deref(),
            progress,
            records_experts: self.records_experts,
            partial: None,
        }
    }

    /// Calls the generator, and passes valid completions that have ended to `receive` with their
    /// places, each one once. `seeds` are those of the batch.
    fn generate(
        &self,
        batch: &GenerationBatch<'_>,
        seeds: &[CompletionSeed],
        receive: &mut (dyn FnMut(usize, Completion) + Send),
    ) -> Result<()> {
        let mut came = vec![false; seeds.len()];
        let mut deliver = |place: usize, completion: Completion| {
            let (Some(&seed), Some(came)) = (seeds.get(place), came.get_mut(place)) else {
                anyhow::bail!(
                    "generator: delivered completion {place}, must be below {}",
                    seeds.len()
                );
            };
            ensure!(!*came, "generator: {} came twice", name(seed));
            let valid = completion.validate(self.vocab_size);
            valid.with_context(|| format!("generator: {}", name(seed)))?;
            *came = true;
            receive(place, completion);
            Ok(())
        };
        self.generator.generate(batch, &mut deliver)
    }

    fn requests<'a>(
        &self,
        prompts: &[&'a Prompt],
        num_generations: usize,
        stream: u64,
    ) -> Vec<PromptRequest<'a>> {
        let mut drawn_of: HashMap<u64, u64> = HashMap::new();
        prompts
            .iter()
            .map(|prompt| {
                let drawn = drawn_of.entry(prompt.index).or_default();
                let samples = *drawn..*drawn + num_generations as u64;
                *drawn = samples.end;
                PromptRequest {
                    tokens: &prompt.tokens,
                    seeds: samples
                        .map(|sample| CompletionSeed {
                            seed: self.config.seed,
                            stream,
                            prompt: prompt.index,
                            sample,
                            turn: 0,
                        })
                        .collect(),
                    max_new_tokens: self.config.max_new_tokens,
                }
            })
            .collect()
    }
}

/// The seeds of all completions.
fn seeds(requests: &[PromptRequest<'_>]) -> Vec<CompletionSeed> {
    let seeds = requests.iter().flat_map(|request| &request.seeds);
    seeds.copied().collect()
}

fn name(seed: CompletionSeed) -> String {
    format!("completion {} of prompt {}", seed.sample, seed.prompt)
}

/// Passes tokens on. The unit of progress is a trajectory, and not a turn.
struct TokensOnly<'a>(&'a dyn Progress);

impl Progress for TokensOnly<'_> {
    fn advance(&self, _: usize, tokens: usize) {
        self.0.advance(0, tokens);
    }

    fn is_canceled(&self) -> bool {
        self.0.is_canceled()
    }
}
