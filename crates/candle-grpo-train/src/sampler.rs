//! Samples completions for prompts from any generator.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_grpo_core::validate::at_least_one;
use candle_grpo_nn::{DecoderConfig, ModelConfig, Parameters};
use tokenizers::Tokenizer;

use crate::ranks::Ranks;
use crate::rollout::decode::decode_tokens;
use crate::rollout::{
    CompletionSeed, DecodeText, GenerationBatch, Generator, LocalGenerator, Play, PromptRequest,
    Trajectories,
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
        let seeds = requests.iter().flat_map(|request| request.seeds.clone());
        let rollout =
            |(place, (completion, seed)): (usize, (Completion, CompletionSeed))| Rollout {
                prompt_index: seed.prompt,
                sample_index: seed.sample as usize,
                prompt_tokens: prompts[place / num_generations].tokens.clone(),
                completion,
                episode: None,
                branches: Vec::new(),
            };
        let completions = completions.into_iter().zip(seeds).enumerate();
        Ok(completions.map(rollout).collect())
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
        let seeds: Vec<CompletionSeed> = requests.iter().flat_map(|r| r.seeds.clone()).collect();
        let mut completions: Vec<Option<Completion>> = vec![None; seeds.len()];
        let mut deliver = |place: usize, completion: Completion| {
            let (Some(seed), Some(slot)) = (seeds.get(place), completions.get_mut(place)) else {
                anyhow::bail!(
                    "generator: delivered completion {place}, must be below {}",
                    seeds.len()
                );
            };
            let name = || format!("completion {} of prompt {}", seed.sample, seed.prompt);
            ensure!(slot.is_none(), "generator: {} came twice", name());
            completion
                .validate(self.vocab_size)
                .with_context(|| format!("generator: {}", name()))?;
            *slot = Some(completion);
            Ok(())
        };
        let mut sampling = Cow::Borrowed(&self.config);
        if !stop_strings.is_empty() {
            sampling
                .to_mut()
                .stop_strings
                .extend_from_slice(stop_strings);
            sampling.validate()?;
        }
        let batch = GenerationBatch {
            prompts: requests,
            sampling: &sampling,
            decode: self.decode.as_deref(),
            progress,
            records_experts: self.records_experts,
        };
        self.generator.generate(&batch, &mut deliver)?;
        completions
            .into_iter()
            .zip(seeds)
            .map(|(completion, seed)| {
                completion.with_context(|| {
                    format!(
                        "generator: completion {} of prompt {} is missing",
                        seed.sample, seed.prompt
                    )
                })
            })
            .collect()
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
