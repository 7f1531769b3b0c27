//! The interface to whatever draws completions.

use anyhow::{Context, Result};
use candle_grpo_nn::{DecoderConfig, Export, Lora, ModelConfig, Parameters};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

use super::Completion;
use super::SamplingConfig;
use crate::Progress;
use crate::random::generator;

/// A source of completions: the model in this process
/// ([`LocalGenerator`](super::LocalGenerator)), an inference engine on another machine, a
/// recording, or an environment around another generator.
///
/// `C` is the configuration of the policy whose weights it receives, a decoder by default.
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
    /// Draws all completions of `batch` and passes each to `deliver` as soon as it has ended, in
    /// any order.
    ///
    /// The first argument of `deliver` is the place of the completion among all completions of the
    /// batch: those of the first prompt come first, in the order of its seeds. Every place must
    /// be delivered once.
    ///
    /// # Errors
    ///
    /// If a completion cannot be drawn, `deliver` returns an error, or with
    /// [`Interrupted`](crate::Interrupted) after [`Progress::is_canceled`] returns true. A
    /// generator that waits, for a server for example, checks it at intervals: the end of a run
    /// waits for the call.
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()>;

    /// Receives the weights of the policy: once before the first completion and after each update,
    /// before the next completion. A trainer never calls it during [`Self::generate`]. The default
    /// implementation ignores them.
    ///
    /// The trainer changes the weights in place after the call, so a generator copies them. If
    /// completions are drawn ahead, `weights` are a copy in main memory, and both methods are
    /// called from a thread other than that of the training.
    ///
    /// # Errors
    ///
    /// If the weights cannot be taken over, or with [`Interrupted`](crate::Interrupted) after
    /// `progress` cancels. The trainer then fails before it samples, and tries again at the next
    /// step. A generator that waits checks [`Progress::is_canceled`] at intervals, as in
    /// [`Self::generate`].
    fn weights_changed(
        &self,
        weights: &PolicyWeights<'_, C>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let _ = (weights, progress);
        Ok(())
    }

    /// Returns true if completions are drawn from the parameters of the policy themselves, which
    /// change in place while the policy trains. Completions are not drawn ahead from such a
    /// generator ([`RolloutConfig::max_staleness`](super::RolloutConfig::max_staleness)). A
    /// wrapper returns the answer of the generator inside.
    fn shares_weights(&self) -> bool {
        false
    }

    /// Returns true if the generators of all ranks of a data-parallel run use the same engine. Rank
    /// 0 then draws the completions of all ranks, and is the only one that receives weights.
    /// Otherwise each rank draws its share. A wrapper returns the answer of the generator inside.
    fn serves_all_ranks(&self) -> bool {
        false
    }
}

/// The receiver of finished completions.
pub type Deliver<'a> = dyn FnMut(usize, Completion) -> Result<()> + Send + 'a;

/// Converts tokens to text.
pub type DecodeText = dyn Fn(&[u32]) -> Result<String> + Send + Sync;

/// A call of [`Generator::generate`].
#[derive(Clone, Copy)]
pub struct GenerationBatch<'a> {
    /// The prompts, at least one.
    pub prompts: &'a [PromptRequest<'a>],
    /// The distribution to draw from, and the tokens and strings that end a completion.
    pub sampling: &'a SamplingConfig,
    /// Converts tokens to text, for a generator that searches for stop strings itself.
    pub decode: Option<&'a DecodeText>,
    /// Receives each finished completion and its tokens, and can cancel the call.
    pub progress: &'a dyn Progress,
    /// If true, the experts of a model that has some are recorded in
    /// [`Completion::experts`](super::Completion::experts).
    pub records_experts: bool,
}

/// A prompt and the completions to draw of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptRequest<'a> {
    /// The tokens to continue, at least one.
    pub tokens: &'a [u32],
    /// One seed for each completion, at least one.
    pub seeds: Vec<CompletionSeed>,
    /// The maximum length of a completion in tokens, at most [`SamplingConfig::max_new_tokens`]. A
    /// request that continues an unfinished completion has less.
    pub max_new_tokens: usize,
}

/// The identity of a completion, from which its random numbers are derived. The other completions
/// of a batch, its order and the number of threads have no influence on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompletionSeed {
    /// [`SamplingConfig::seed`].
    pub seed: u64,
    /// The training step and sampling round, or 0 in an evaluation.
    pub stream: u64,
    /// [`Prompt::index`](crate::Prompt::index).
    pub prompt: u64,
    /// The number of the completion among those of the prompt.
    pub sample: u64,
    /// The number of the turn in its trajectory, from 0.
    pub turn: u64,
}

impl CompletionSeed {
    /// A single number for an engine whose seeds are 64-bit integers.
    pub fn to_u64(self) -> u64 {
        self.random().next_u64()
    }

    /// The random numbers of the completion.
    pub(crate) fn random(self) -> ChaCha8Rng {
        let mut random = generator(self.seed, self.stream, self.prompt, self.sample);
        random.set_stream(self.turn);
        random
    }
}

/// The weights of the policy at one point of the training.
///
/// [`LocalGenerator`](super::LocalGenerator) shares the parameters and needs only the version,
/// unless it is [detached](super::LocalGenerator::detached). A generator in another process copies
/// the adapters, or the parameters; those of a decoder have the names of Hugging Face.
pub struct PolicyWeights<'a, C = DecoderConfig> {
    /// The number of training steps that have changed the weights.
    pub version: u64,
    /// The shape of the policy.
    pub model: &'a C,
    /// The parameters; with adapters the frozen ones to which these are added.
    pub parameters: &'a Parameters,
    /// The adapters, if they train in place of the parameters.
    pub adapters: Option<&'a Lora>,
}

impl<C> Clone for PolicyWeights<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for PolicyWeights<'_, C> {}

impl<'a, C: ModelConfig> PolicyWeights<'a, C> {
    /// The parameters for a file, with the adapters merged into them in f32.
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
    /// If the adapters belong to another model.
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
