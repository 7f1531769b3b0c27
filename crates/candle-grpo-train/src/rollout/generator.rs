//! The interface to anything that samples completions.

use anyhow::{Context, Result, ensure};
use candle_grpo_nn::{DecoderConfig, Export, Lora, ModelConfig, Parameters};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;
use serde::{Deserialize, Serialize};

use super::Completion;
use super::SamplingConfig;
use crate::Progress;
use crate::random::generator;

/// A source of completions: the model in this process ([`LocalGenerator`](super::LocalGenerator)),
/// an inference engine on another machine, a recording, or an environment around another generator.
///
/// `C` is the policy's configuration, by default a decoder's.
///
/// [`Sampler`](crate::Sampler) builds the requests and checks the completions. A trainer shares the
/// generator with other threads, so its methods take `&self`.
///
/// ```
/// use std::sync::Arc;
///
/// use anyhow::Result;
/// use candle_grpo_train::model::character_tokenizer;
/// use candle_grpo_train::rollout::{Deliver, GenerationBatch};
/// use candle_grpo_train::{
///     Completion, FinishReason, Generator, Prompt, Sampler, SamplingConfig,
/// };
///
/// /// Repeats the prompt.
/// struct Echo;
///
/// impl Generator for Echo {
///     fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
///         let mut place = 0;
///         for prompt in batch.prompts {
///             let tokens = prompt.tokens.iter().take(prompt.max_new_tokens);
///             for _ in &prompt.seeds {
///                 let length = tokens.len();
///                 let completion = Completion {
///                     tokens: tokens.clone().copied().collect(),
///                     drawn_log_probs: vec![0.; length], // drawn with certainty
///                     log_probs: None,
///                     written: None,
///                     weight_versions: vec![0; length],
///                     finish_reason: FinishReason::Length,
///                     experts: None,
///                 };
///                 deliver(place, completion)?;
///                 place += 1;
///             }
///         }
///         Ok(())
///     }
/// }
///
/// let tokenizer = character_tokenizer("abc")?;
/// let sampler = Sampler::from_generator(Arc::new(Echo), 4, SamplingConfig::default())?;
/// let prompt = Prompt::new(0, "cab", serde_json::Value::Null, &tokenizer)?;
/// let drawn = sampler.sample(&[&prompt], 2, 0)?;
/// assert_eq!(drawn[1].completion.tokens, [3, 1, 2]);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub trait Generator<C = DecoderConfig>: Send + Sync {
    /// Samples all completions in `batch`, and passes each to `deliver` as soon as it has ended, in
    /// any order.
    ///
    /// The first argument to `deliver` is the completion's place in the batch: the first prompt's
    /// completions come first, in the order of its seeds. Every place must be delivered once,
    /// unless `batch` is [partial](GenerationBatch::partial).
    ///
    /// # Errors
    ///
    /// Fails if a completion cannot be sampled, if `deliver` returns an error, or with
    /// [`Interrupted`](crate::Interrupted) after [`Progress::is_canceled`] returns true. A
    /// generator that waits, for example for a server, must check it at intervals, because the end
    /// of a run waits for the call.
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()>;

    /// Receives the policy's weights: once before the first completion, and after each update
    /// before the next completion. A trainer never calls it during [`Self::generate`]. By default,
    /// they are ignored.
    ///
    /// The trainer changes the weights in place after the call, so a generator must copy them. If
    /// completions are sampled ahead, `weights` are a copy in main memory, and both methods are
    /// called from another thread than the training thread.
    ///
    /// # Errors
    ///
    /// Fails if the weights cannot be loaded, or with [`Interrupted`](crate::Interrupted) after
    /// `progress` cancels. The trainer then fails before it samples, and tries again in the next
    /// step. A generator that waits must check [`Progress::is_canceled`] at intervals, as in
    /// [`Self::generate`].
    fn weights_changed(
        &self,
        weights: &PolicyWeights<'_, C>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let _ = (weights, progress);
        Ok(())
    }

    /// Releases memory until the next call to [`Self::weights_changed`]. A trainer calls it after
    /// the completions of each step, before the policy trains, unless completions are sampled
    /// ahead. Returns whether the weights are lost: [`Self::weights_changed`] then follows before
    /// the next completion, even if the policy has not changed. By default, nothing is released. A
    /// wrapper returns the inner generator's answer.
    ///
    /// # Errors
    ///
    /// Fails if the memory cannot be released, or with [`Interrupted`](crate::Interrupted) after
    /// `progress` cancels.
    fn sleep(&self, progress: &dyn Progress) -> Result<bool> {
        let _ = progress;
        Ok(false)
    }

    /// Returns true if completions are sampled from the policy's own parameters, which change in
    /// place while the policy trains. Such a generator cannot sample ahead
    /// ([`RolloutConfig::max_staleness`](super::RolloutConfig::max_staleness)). A wrapper returns
    /// the inner generator's answer.
    fn shares_weights(&self) -> bool {
        false
    }

    /// Returns true if all ranks in a data-parallel run use the same engine. Rank 0 then samples
    /// all ranks' completions, and only rank 0 receives weights. Otherwise, each rank samples its
    /// share. A wrapper returns the inner generator's answer.
    fn serves_all_ranks(&self) -> bool {
        false
    }
}

/// Receives finished completions.
pub type Deliver<'a> = dyn FnMut(usize, Completion) -> Result<()> + Send + 'a;

/// Converts tokens to text.
pub type DecodeText = dyn Fn(&[u32]) -> Result<String> + Send + Sync;

/// A call to [`Generator::generate`].
#[derive(Clone, Copy)]
pub struct GenerationBatch<'a> {
    /// The prompts, at least one.
    pub prompts: &'a [PromptRequest<'a>],
    /// The distribution to sample from, and the tokens and strings that end a completion.
    pub sampling: &'a SamplingConfig,
    /// Converts tokens to text, for a generator that searches for stop strings itself.
    pub decode: Option<&'a DecodeText>,
    /// Receives each finished completion and its tokens, and can cancel the call.
    pub progress: &'a dyn Progress,
    /// If true, and the model has experts, they are recorded in
    /// [`Completion::experts`](super::Completion::experts).
    pub records_experts: bool,
    /// Lets the call end before all completions have ended. A generator may ignore it, and sample
    /// all completions from their start to their end.
    pub partial: Option<Partial<'a>>,
}

/// A call that continues completions, and ends as soon as enough of them have ended.
#[derive(Clone, Copy)]
pub struct Partial<'a> {
    /// The beginning of each completion in the batch, by its place: at least one token, and fewer
    /// than the request's `max_new_tokens`, which counts them. Their weight versions and log-probs
    /// stay as they are. `None` for a completion without tokens.
    pub begun: &'a [Option<Completion>],
    /// Returns true once no further tokens are needed. The answer changes while completions are
    /// delivered.
    pub is_enough: &'a (dyn Fn() -> bool + Sync),
    /// Receives the completions that have tokens but have not ended when the call ends, with their
    /// places. Their finish reason is ignored.
    pub unfinished: &'a (dyn Fn(usize, Completion) -> Result<()> + Sync),
}

impl Partial<'_> {
    /// Checks the beginnings of the completions for `prompts`, for a model with `vocab_size`
    /// tokens.
    pub(super) fn validate(&self, prompts: &[PromptRequest<'_>], vocab_size: usize) -> Result<()> {
        let most = prompts
            .iter()
            .flat_map(|request| request.seeds.iter().map(|_| request.max_new_tokens));
        for (place, (begun, most)) in self.begun.iter().zip(most).enumerate() {
            let Some(begun) = begun else { continue };
            let valid = begun.validate(vocab_size);
            valid.with_context(|| format!("begun[{place}]"))?;
            ensure!(
                begun.tokens.len() < most,
                "begun[{place}]: {} tokens, must be fewer than {most}",
                begun.tokens.len()
            );
        }
        Ok(())
    }
}

/// A prompt, and the completions to sample for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptRequest<'a> {
    /// The tokens to continue, at least one.
    pub tokens: &'a [u32],
    /// One seed per completion, at least one.
    pub seeds: Vec<CompletionSeed>,
    /// Maximum completion length in tokens, at most [`SamplingConfig::max_new_tokens`]. It is
    /// smaller for a request that continues an unfinished completion.
    pub max_new_tokens: usize,
}

/// A completion's identity, which determines its random numbers. They do not depend on the other
/// completions in a batch, their order, or the number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionSeed {
    /// [`SamplingConfig::seed`].
    pub seed: u64,
    /// The training step and sampling round, or 0 in an evaluation.
    pub stream: u64,
    /// [`Prompt::index`](crate::Prompt::index).
    pub prompt: u64,
    /// The completion's number among those for the prompt.
    pub sample: u64,
    /// The turn's number in its trajectory, from 0.
    pub turn: u64,
}

impl CompletionSeed {
    /// Returns a single number, for an engine whose seeds are 64-bit integers.
    pub fn to_u64(self) -> u64 {
        self.to_u64_after(0)
    }

    /// Returns the number for a request that continues the completion after its first `tokens`
    /// tokens.
    pub fn to_u64_after(self, tokens: usize) -> u64 {
        let mut random = self.random();
        // In words of 32 bits.
        random.set_word_pos(2 * tokens as u128);
        random.next_u64()
    }

    /// Returns the completion's random numbers.
    pub(crate) fn random(self) -> ChaCha8Rng {
        let mut random = generator(self.seed, self.stream, self.prompt, self.sample);
        random.set_stream(self.turn);
        random
    }
}

/// The policy's weights at one point during training.
///
/// [`LocalGenerator`](super::LocalGenerator) shares the parameters and only needs the version,
/// unless it is [detached](super::LocalGenerator::detached). A generator in another process copies
/// the adapters or the parameters. A decoder's parameters have Hugging Face names.
pub struct PolicyWeights<'a, C = DecoderConfig> {
    /// Number of training steps that have changed the weights.
    pub version: u64,
    /// The policy's shape.
    pub model: &'a C,
    /// The parameters. With adapters, the frozen ones that these extend.
    pub parameters: &'a Parameters,
    /// The adapters, if they train instead of the parameters.
    pub adapters: Option<&'a Lora>,
}

impl<C> Clone for PolicyWeights<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for PolicyWeights<'_, C> {}

impl<'a, C: ModelConfig> PolicyWeights<'a, C> {
    /// Returns the parameters for a file, with the adapters merged into them in f32.
    pub fn export(&self) -> Export<'a> {
        match self.adapters {
            None => Export::new(self.parameters),
            Some(adapters) => adapters.export(self.parameters),
        }
    }

    /// Returns the parameters with the adapters merged into them.
    ///
    /// # Errors
    ///
    /// Fails if the adapters belong to another model.
    pub fn merged(&self) -> Result<Parameters> {
        match self.adapters {
            None => Ok(self.parameters.clone()),
            Some(adapters) => {
                let model = self.model.decoder();
                let model = model.context("adapters: given, must be absent for a custom model")?;
                Ok(adapters.merged(model, self.parameters)?)
            }
        }
    }
}
