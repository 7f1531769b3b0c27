//! The memory of a run, computed before it starts.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_core::{DType, Shape};
use candle_grpo_core::validate::at_least_one;
use candle_grpo_kernels::{
    CUDA_KEPT_LOGITS, CUDA_TILE_COLUMNS, CUDA_TILE_LOGITS, LinearLogProb, cuda_is_enabled,
};
use candle_grpo_loss::{DistillationLoss, linear_distillation_bytes};
use candle_grpo_nn::model::MergedBytes;
use candle_grpo_nn::optim::{
    BUCKET_BYTES, GradientDType, MasterWeights, Sharding, StateForm, StateMemory,
};
use candle_grpo_nn::{
    ActivationCheckpointing, AdamWConfig, BaseWeights, ComputeDType, DecoderConfig, LoraConfig,
};

use super::actor::divides_weights;
use super::micro_batches::MicroBatchSize;
use super::needs::{Needs, Source};
use super::self_teacher::SelfTeacherConfig;
use crate::rollout::{STEPS_BEFORE_PACKING, prefill_tokens};
use crate::sequence::response_forward::states_at_once;
use crate::{CriticConfig, SamplingConfig, TrainConfig};

/// Buffers of matrix products on CUDA: the workspace of cuBLAS.
const WORKSPACE: usize = 64 << 20;

/// The pages of the allocator of `grpo` for small tensors.
const SMALL_TENSORS: usize = 100 << 20;

/// The names of the weights of blocks begin with it, and then have a number.
const LAYERS: &str = "model.layers.";

/// The pages of the allocator of `grpo` that each thread keeps for its buffers.
const PAGES_OF_THREAD: usize = 12 << 20;

/// The buffers of matrix products on the CPU: about 1 MiB for each thread, and 4 MiB because
/// threads overlap differently in each run.
fn products() -> usize {
    (4 + rayon::current_num_threads()) << 20
}

/// The bytes of the output layer on CUDA for a pass over `tokens`: the logits of f32 that are kept,
/// a tile of them, the gradient of the tile in a dtype of half the size, and buffers.
fn cuda_logits(tokens: usize, vocab_size: usize) -> usize {
    let logits = tokens.saturating_mul(vocab_size);
    let least = tokens.saturating_mul(CUDA_TILE_COLUMNS);
    let tile = logits.min(CUDA_TILE_LOGITS.max(least));
    4 * logits.min(CUDA_KEPT_LOGITS) + 4 * tile + 2 * tile + WORKSPACE
}

/// The bytes that a run takes in the memory of its device, if every completion has the largest
/// length and every prompt and demonstration is as long as the longest one. A pass with a bound of
/// tokens counts as full, because shorter sequences can fill it.
///
/// Not counted are reward models, and without [`Self::in_program`] the program with its data set,
/// tokenizer and allocator.
///
/// ```
/// use candle_grpo_nn::DecoderConfig;
/// use candle_grpo_train::TrainConfig;
/// use candle_grpo_train::learn::MemoryPlan;
///
/// let model = DecoderConfig { vocab_size: 1000, hidden_size: 64, intermediate_size: 128,
///     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
///     ..DecoderConfig::default() };
/// let plan = MemoryPlan::new(&model, &TrainConfig::default(), 100, 0)?;
/// assert_eq!(plan.gradients, plan.weights);
/// assert_eq!(plan.optimizer, 2 * plan.weights);
/// assert!(plan.peak() > plan.weights + plan.optimizer);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights of the policy that train, in the dtype of the master weights, and copies in the
    /// dtypes of the computation and of the draws, or with merged adapters. Those of completions
    /// that are drawn ahead are left out, unless adapters are merged into them.
    pub weights: usize,
    /// Weights of the policy that do not train, in their form.
    ///
    /// [`BaseWeights::Stored`](candle_grpo_nn::BaseWeights::Stored) counts as dense weights: the
    /// blocks of a file are not known here, but from
    /// [`Gguf::frozen_bytes`](candle_grpo_nn::Gguf::frozen_bytes).
    pub frozen: usize,
    /// Weights of the reference, unless it shares those of the policy.
    pub reference: usize,
    /// Weights of teachers in this process: 0 unless [`Self::with_teacher`] or
    /// [`Self::with_self_teacher`] adds them.
    pub teacher: usize,
    /// Weights of the critic, and the state of its optimizer.
    pub critic: usize,
    /// State of the optimizer of the policy.
    pub optimizer: usize,
    /// Main memory beside a GPU: state of optimizers, f32 weights of the policy
    /// ([`StateMemory::Host`]), and inputs of layers ([`TrainConfig::activation_offloading`]). The
    /// other numbers are without them. 0 on the CPU.
    pub host: usize,
    /// Gradients, while the policy trains.
    pub gradients: usize,
    /// Tensors of the longest backward pass.
    pub activations: usize,
    /// Gradients and activations together, at their peak.
    pub training: usize,
    /// The cache of keys and values and the logits, while completions of a step are drawn, or the
    /// largest weight while adapters are merged. With
    /// [`Self::with_teacher_samples`], also while a teacher draws, which comes later.
    pub sampling: usize,
    /// The same for an evaluation: 0 unless [`Self::with_evaluation`] sets it.
    pub evaluation: usize,
    /// All weights in the dtype of the computation, which ranks gather while completions are
    /// drawn, if they divide them. 0 if they do not, or if servers draw from all weights that
    /// train.
    pub held: usize,
    /// Weights of the policy while they are read, before the run, if ranks divide those in f32:
    /// each weight before the next. 0 if they do not.
    pub loading: usize,
    /// Copies of weights, while many tokens are drawn on the CPU
    /// ([`pack_weights`](candle_grpo_nn::PagedCache::pack_weights)).
    pub packed: usize,
    /// The program, its data set and its tokenizer, in main memory: 0 unless [`Self::in_program`]
    /// sets it.
    pub program: usize,
    /// The pages of the allocator in which no tensor is, in main memory: 0 unless
    /// [`Self::in_program`] sets it.
    pub allocator: usize,
}

impl MemoryPlan {
    /// Computes the memory of a run of `model` whose longest prompt has `prompt_tokens` tokens, and
    /// whose longest demonstration has `demonstration_tokens`; without any, this is 0.
    ///
    /// # Errors
    ///
    /// If `config` or its adapters are not valid.
    pub fn new(
        model: &DecoderConfig,
        config: &TrainConfig,
        prompt_tokens: usize,
        demonstration_tokens: usize,
    ) -> Result<Self> {
        let lengths = (prompt_tokens, demonstration_tokens);
        Self::of_rank(model, config, lengths, 1)
    }

    /// [`Self::new`] of one of `world_size` ranks, with the lengths of prompts and demonstrations.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`], and if there are no ranks.
    pub fn of_rank(
        model: &DecoderConfig,
        config: &TrainConfig,
        (prompt_tokens, demonstration_tokens): (usize, usize),
        world_size: usize,
    ) -> Result<Self> {
        at_least_one("world_size", world_size)?;
        config.validate()?;
        let (group, in_flight) = (config.num_generations, config.prompts_in_flight());
        let update = Update::new(config, prompt_tokens);
        let drawn_passes = update.passes(config.micro_batches()?);
        let drawn_passes = drawn_passes.map(|pass| pass.in_team(config.sequence_ranks));
        let mut passes = drawn_passes.to_vec();
        if let Some(demonstrations) = &config.demonstrations {
            let sizes = (
                demonstrations.micro_batch_tokens,
                demonstrations.most_rows(config),
            );
            let [mut first, rest] = examples(sizes, demonstration_tokens);
            first.follows = true;
            passes.extend([first, rest]);
        }
        let learning = Learning {
            adapters: config.adapters.as_ref(),
            base_weights: config.base_weights,
            compute_dtype: config.compute_dtype,
            activation_checkpointing: config.activation_checkpointing,
            activation_offloading: config.activation_offloading,
            optimizer: &config.optimizer,
            passes: &passes,
            distillation: config.recipe.distillation_loss.as_ref(),
            on_cuda: cuda_is_enabled(),
            division: Division::new(config.sharding, world_size),
        };
        let drawn_in = DType::from(config.rollout_dtype());
        let shapes: Vec<Shape> = model.parameter_shapes().into_values().collect();
        let all: usize = shapes.iter().map(Shape::elem_count).sum();
        let needs = Needs::new(config, None);
        let draws = Draws {
            prompts: in_flight,
            samples_per_prompt: group,
            prompt_tokens,
            sampling: &config.sampling,
        };
        let mut plan = learning.plan(model)?;
        if let Some(critic) = &config.critic {
            let bytes = critic_bytes(model, critic, &drawn_passes, learning.division)?;
            plan.critic = bytes.weights;
            if on_host(&critic.optimizer, learning.on_cuda) {
                plan.host += bytes.state;
            } else {
                plan.critic += bytes.state;
            }
            plan.training = plan.training.max(bytes.training);
        }
        let merged = config.merged_bytes(model)?;
        // Of the weights that train, which are f32, and of the frozen ones that are not in blocks.
        let copies = match (config.own_rollout_dtype(), merged) {
            // The thread that samples ahead has its own.
            (_, Some(merged)) if config.rollout.max_staleness > 0 => 2 * merged.copies,
            (_, Some(merged)) => merged.copies,
            (None, None) => 0,
            (Some(dtype), None) => {
                let frozen = |dtype| match &config.adapters {
                    None => Ok(0),
                    Some(_) => config.base_weights.num_bytes(model, dtype),
                };
                plan.weights / 2 + frozen(DType::F32)? - frozen(dtype.into())?
            }
        };
        Ok(Self {
            weights: plan.weights + copies,
            reference: if needs.reads(Source::Reference) && config.adapters.is_none() {
                let bytes = policy_copy_bytes(all, config, config.reference_refresh.is_some());
                learning.division.of_weights(bytes)
            } else {
                0
            },
            sampling: draws
                .bytes(model, drawn_in)
                .max(merged.map_or(0, |merged| merged.merging)),
            held: if learning.division.is_full() && config.holds_weights() {
                BaseWeights::Dense.num_bytes(model, drawn_in)?
            } else {
                0
            },
            packed: draws.packed_bytes(model, config, plan.gradients)?,
            ..plan
        })
    }

    /// Returns this plan with evaluations that draw `draws`, between steps with `config`.
    ///
    /// # Errors
    ///
    /// If the settings of the draws are not valid.
    pub fn with_evaluation(
        self,
        model: &DecoderConfig,
        config: &TrainConfig,
        draws: Draws<'_>,
    ) -> Result<Self> {
        draws.validate()?;
        let packed = draws.packed_bytes(model, config, self.gradients)?;
        Ok(Self {
            evaluation: draws.bytes(model, config.rollout_dtype().into()),
            packed: self.packed.max(packed),
            ..self
        })
    }

    /// Returns this plan with one more teacher in this process, of the shape `model`, beside a
    /// policy with these settings on one of `world_size` ranks.
    #[must_use]
    pub fn with_teacher(
        self,
        model: &DecoderConfig,
        config: &TrainConfig,
        world_size: usize,
    ) -> Self {
        let shapes = model.parameter_shapes();
        let count: usize = shapes.values().map(Shape::elem_count).sum();
        let bytes = count * DType::from(config.compute_dtype).size_in_bytes();
        let share = if config.divides_teachers() {
            Division::new(config.sharding, world_size).of_weights(bytes)
        } else {
            bytes
        };
        Self {
            teacher: self.teacher + share,
            ..self
        }
    }

    /// Returns this plan with the samples of a teacher in this process, of the shape `model`, for
    /// prompts of up to `prompt_tokens` tokens. Without [`TrainConfig::teacher_samples`], there are
    /// none.
    ///
    /// # Errors
    ///
    /// If the settings are not valid.
    pub fn with_teacher_samples(
        self,
        model: &DecoderConfig,
        config: &TrainConfig,
        prompt_tokens: usize,
    ) -> Result<Self> {
        let Some(samples) = config.teacher_samples() else {
            return Ok(self);
        };
        let draws = Draws {
            prompts: config.most_prompts_per_step(),
            samples_per_prompt: samples.samples_per_prompt,
            prompt_tokens,
            sampling: &samples.sampling(&config.sampling),
        };
        draws.validate()?;
        let dtype = DType::from(config.compute_dtype);
        let packed = if draws.packs() {
            model.packed_bytes((BaseWeights::Dense, None), dtype)?
        } else {
            0
        };
        Ok(Self {
            sampling: self.sampling.max(draws.bytes(model, dtype)),
            packed: self.packed.max(packed),
            ..self
        })
    }

    /// Returns this plan with the policy of the shape `model` as one more teacher, which reads
    /// prompts of up to `prompt_tokens`, on one of `world_size` ranks. With adapters, only those
    /// that it follows are copied.
    ///
    /// # Errors
    ///
    /// If the settings are not valid for the model.
    pub fn with_self_teacher(
        self,
        model: &DecoderConfig,
        config: &TrainConfig,
        (teacher, prompt_tokens): (&SelfTeacherConfig, usize),
        world_size: usize,
    ) -> Result<Self> {
        let follows = teacher.refresh.is_some();
        let division = Division::new(config.sharding, world_size);
        let shapes = match &config.adapters {
            None => model.parameter_shapes().into_values().collect(),
            Some(adapters) if follows => adapter_shapes(adapters, model)?,
            Some(_) => Vec::new(),
        };
        let count = shapes.iter().map(Shape::elem_count).sum();
        let passes = Update::new(config, prompt_tokens).passes(config.micro_batches()?);
        let passes = passes.map(|pass| pass.in_team(config.sequence_ranks));
        let longest = passes.iter().map(|pass| pass.tokens).max();
        let read = model.forward_bytes(longest.unwrap_or(0), config.compute_dtype.into());
        Ok(Self {
            teacher: self.teacher + division.of_weights(policy_copy_bytes(count, config, follows)),
            training: self.training.max(read),
            ..self
        })
    }

    /// Returns this plan on the CPU in a program of `bytes`, without tensors, that has mimalloc and
    /// keeps freed pages for the next step, as `grpo` does.
    ///
    /// The pages without tensors are a bound of measured runs, see docs/llm.md. Tensors begin
    /// slices of 64 KiB, and the gaps between them are resident, because the system has pages of 2
    /// MiB: a thirteenth. Of the memory that drawing has freed, training reuses all but an eighth,
    /// and the other way round. 100 MiB are those of small tensors, with the 2% that peaks differ
    /// between runs, and 12 MiB those of each thread: it has its own pages of up to 4 MiB for
    /// buffers of similar size.
    #[must_use]
    pub fn in_program(self, bytes: usize) -> Self {
        let reused = self.training.min(self.drawing());
        let threads = rayon::current_num_threads();
        Self {
            program: bytes,
            allocator: self.peak() / 13 + reused / 8 + SMALL_TENSORS + threads * PAGES_OF_THREAD,
            ..self
        }
    }

    /// The bytes at the peak: drawing and training alternate, after the weights are loaded.
    pub fn peak(&self) -> usize {
        let others = self.reference + self.teacher + self.critic;
        let kept = self.weights + self.frozen + others + self.optimizer;
        let phase = self.training.max(self.drawing());
        self.program + self.allocator + (kept + phase).max(self.loading)
    }

    /// The bytes while completions are drawn, for steps or evaluations.
    fn drawing(&self) -> usize {
        self.sampling.max(self.evaluation) + self.held + self.packed
    }
}

impl TrainConfig {
    /// The memory for weights with merged adapters, if completions are drawn from them.
    pub(super) fn merged_bytes(&self, model: &DecoderConfig) -> Result<Option<MergedBytes>> {
        let adapters = self.adapters.as_ref();
        let merged = adapters
            .filter(|_| self.rollout.merge_adapters)
            .map(|adapters| {
                let base = (self.base_weights, self.compute_dtype.into());
                model.merged_bytes(adapters, base, self.rollout_dtype().into())
            });
        Ok(merged.transpose()?)
    }
}

/// The bytes of a copy of `count` weights of the policy, which are f32 as well if it `follows` the
/// policy.
fn policy_copy_bytes(count: usize, config: &TrainConfig, follows: bool) -> usize {
    let dtype = config.compute_dtype;
    count
        * if follows {
            4 + copy_bytes(dtype)
        } else {
            DType::from(dtype).size_in_bytes()
        }
}

/// Completions that are drawn together.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// The number of prompts.
    pub prompts: usize,
    /// The number of completions of each prompt.
    pub samples_per_prompt: usize,
    /// The number of tokens of the longest prompt.
    pub prompt_tokens: usize,
    /// The settings.
    pub sampling: &'a SamplingConfig,
}

impl Draws<'_> {
    fn validate(&self) -> Result<()> {
        at_least_one("samples_per_prompt", self.samples_per_prompt)?;
        self.sampling.validate()
    }

    /// All completions.
    fn total(&self) -> usize {
        self.prompts.saturating_mul(self.samples_per_prompt)
    }

    /// The cache of keys and values and the logits, with weights in `dtype`.
    fn bytes(&self, model: &DecoderConfig, dtype: DType) -> usize {
        if self.total() == 0 {
            return 0;
        }
        let (group, prompt) = (self.samples_per_prompt, self.prompt_tokens);
        let drawn = self.total().min(self.sampling.max_batch_size);
        let groups = drawn.div_ceil(group);
        let lengths = (prompt, self.sampling.max_new_tokens);
        let limit = self.sampling.max_cache_mib;
        let limit = limit.map_or(usize::MAX, |mib| mib.saturating_mul(1 << 20));
        let cache = model.cache_bytes((groups, group), lengths, dtype, cuda_is_enabled());
        let cache = cache.min(limit);
        let prefill = prefill_tokens(cuda_is_enabled()).saturating_add(prompt);
        let prefill = prefill.min(groups * prompt);
        let prefill = model.forward_bytes(prefill, dtype);
        let logits = |rows: usize| rows * model.vocab_size * 4;
        // Those after the prompts are concatenated.
        let begun = logits(groups) + prefill.max(logits(groups));
        // Recordings keep the memory of the tensors within.
        let step = if cuda_is_enabled() {
            model.step_bytes(drawn, lengths, dtype)
        } else {
            0
        };
        cache + step + begun.max(logits(drawn)) + products()
    }

    /// Returns whether the batch is long enough for copies of weights to draw from.
    fn packs(&self) -> bool {
        let rounds = self.total().div_ceil(self.sampling.max_batch_size);
        // The first token of each completion comes from the pass over its prompt.
        let steps = rounds.saturating_mul(self.sampling.max_new_tokens.saturating_sub(1));
        !cuda_is_enabled() && steps > STEPS_BEFORE_PACKING
    }

    /// The copies of weights that the CPU draws from.
    fn packed_bytes(
        &self,
        model: &DecoderConfig,
        config: &TrainConfig,
        adapters: usize,
    ) -> Result<usize> {
        if !self.packs() {
            return Ok(0);
        }
        let dtype = DType::from(config.rollout_dtype());
        let base = config.base_weights;
        Ok(match &config.adapters {
            None => model.packed_bytes((BaseWeights::Dense, None), dtype)?,
            Some(merged) if config.rollout.merge_adapters => {
                model.packed_bytes((base, Some(merged)), dtype)?
            }
            // The rows of adapters are padded, so that their copies have up to twice their size.
            Some(_) => model.packed_bytes((base, None), dtype)? + 2 * adapters,
        })
    }
}

/// A backward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass {
    /// The tokens that the model reads.
    tokens: usize,
    /// The tokens of all sequences. A prompt that they share counts in each.
    expanded: usize,
    /// True if there are gradients of an earlier pass.
    follows: bool,
    /// True for a pass over given answers.
    is_supervised: bool,
    /// The tokens whose keys and values the ranks of a team exchange, each once, and with those
    /// that sequences share in each: 0 if no team divides the pass.
    exchanged: (usize, usize),
}

impl Pass {
    /// The part of one of `ranks` that divide the tokens.
    fn in_team(self, ranks: usize) -> Self {
        if ranks == 1 {
            return self;
        }
        // Each rank has the queries of its own tokens alone.
        let tokens = self.tokens.div_ceil(ranks);
        Self {
            tokens,
            expanded: tokens,
            exchanged: (self.tokens, self.expanded),
            ..self
        }
    }

    /// The bytes of the keys and values of other ranks, and of their gradients, while a block runs.
    fn exchange(self, model: &DecoderConfig, dtype: DType) -> usize {
        let width = model.num_key_value_heads * model.head_dim();
        let (tokens, expanded) = self.exchanged;
        // Sums over the ranks are f32.
        let (size, sum) = (dtype.size_in_bytes(), 4);
        2 * width * (2 * expanded * size + tokens * sum)
    }
}

/// The completions of an update, with their largest lengths.
pub(super) struct Update {
    sequences: usize,
    /// The number of them for each prompt.
    group: usize,
    prompt: usize,
    /// The tokens of a completion that the model reads.
    response: usize,
}

impl Update {
    pub(super) fn new(config: &TrainConfig, prompt_tokens: usize) -> Self {
        let all = config
            .prompts_per_step
            .saturating_mul(config.num_generations);
        Self {
            sequences: config.mini_batch_size.unwrap_or(all).min(all),
            group: config.num_generations,
            prompt: prompt_tokens,
            response: config.sampling.max_new_tokens.saturating_sub(1),
        }
    }

    /// The tokens of the longest sequence that the model reads.
    pub(super) fn longest(&self) -> usize {
        self.prompt + self.response
    }

    /// The tokens that the model reads, if it reads all sequences in one pass.
    pub(super) fn tokens(&self) -> usize {
        self.pass(self.sequences).tokens
    }

    /// A pass over this number of completions.
    fn pass(&self, sequences: usize) -> Pass {
        let prompts = sequences.div_ceil(self.group);
        Pass {
            tokens: prompts * self.prompt + sequences * self.response,
            expanded: sequences * (self.prompt + self.response),
            follows: false,
            is_supervised: false,
            exchanged: (0, 0),
        }
    }

    /// The longest passes: the first one, and those that follow it, which may have no tokens.
    fn passes(&self, size: MicroBatchSize) -> [Pass; 2] {
        let sequences = self.sequences;
        let (first, rest) = match size {
            MicroBatchSize::Sequences(size) => {
                let first = size.min(sequences);
                (self.pass(first), self.pass(first.min(sequences - first)))
            }
            MicroBatchSize::Tokens(bound) | MicroBatchSize::TokensOfRows(bound) => {
                let longest = (1..=sequences).map(|sequences| self.pass(sequences));
                let longest = longest.take_while(|pass| pass.tokens <= bound).last();
                let longest = longest.unwrap_or_else(|| self.pass(1));
                // Shorter completions may fill the bound.
                let all = self.pass(sequences).tokens;
                let tokens = longest.tokens.max(bound.min(all));
                let rest = rest(tokens, all, self.longest());
                let of_tokens = |tokens| Pass { tokens, ..longest };
                (of_tokens(tokens), of_tokens(rest))
            }
        };
        let follows = true;
        [first, Pass { follows, ..rest }]
    }
}

/// The most tokens of a pass after the one over the `first` of `all` tokens, in which there was no
/// place for one of the sequences, of up to `longest` tokens.
fn rest(first: usize, all: usize, longest: usize) -> usize {
    match all.saturating_sub(first) {
        0 => 0,
        left => first.min(left + longest),
    }
}

/// The longest passes over a batch of examples of up to `longest` tokens: the first one, and those
/// that follow it, which may have no tokens.
pub(crate) fn examples(
    (micro_batch_tokens, batch_size): (usize, usize),
    longest: usize,
) -> [Pass; 2] {
    let all = batch_size.saturating_mul(longest);
    let first = micro_batch_tokens.max(longest).min(all);
    let pass = |tokens, follows| Pass {
        tokens,
        expanded: tokens,
        follows,
        is_supervised: true,
        exchanged: (0, 0),
    };
    [pass(first, false), pass(rest(first, all, longest), true)]
}

/// The settings of an optimizer step.
pub(crate) struct Learning<'a> {
    pub(crate) adapters: Option<&'a LoraConfig>,
    pub(crate) base_weights: BaseWeights,
    pub(crate) compute_dtype: ComputeDType,
    pub(crate) activation_checkpointing: ActivationCheckpointing,
    pub(crate) activation_offloading: bool,
    pub(crate) optimizer: &'a AdamWConfig,
    /// The longest backward passes of an update.
    pub(crate) passes: &'a [Pass],
    /// The term of the loss that learns from a teacher.
    pub(crate) distillation: Option<&'a DistillationLoss>,
    /// True if the policy trains on CUDA, false on the CPU.
    pub(crate) on_cuda: bool,
    /// The tensors that ranks divide.
    pub(crate) division: Division,
}

/// The tensors that ranks divide, and the number of ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    sharding: Sharding,
    world_size: usize,
}

impl Division {
    /// One rank divides nothing.
    pub(crate) fn new(sharding: Sharding, world_size: usize) -> Self {
        let sharding = match world_size {
            1 => Sharding::None,
            _ => sharding,
        };
        Self {
            sharding,
            world_size,
        }
    }

    fn divides_gradients(self) -> bool {
        matches!(self.sharding, Sharding::Resident | Sharding::Full)
    }

    fn is_full(self) -> bool {
        self.sharding == Sharding::Full
    }

    /// The share of the state of an optimizer with `bytes`.
    fn state(self, bytes: usize) -> usize {
        match self.sharding {
            Sharding::None => bytes,
            _ => bytes.div_ceil(self.world_size),
        }
    }

    /// The share of gradients with `bytes`, or of f32 weights.
    fn of_gradients(self, bytes: usize) -> usize {
        if self.divides_gradients() {
            bytes.div_ceil(self.world_size)
        } else {
            bytes
        }
    }

    /// The share of weights with `bytes` in the dtype of the computation.
    fn of_weights(self, bytes: usize) -> usize {
        if self.is_full() {
            bytes.div_ceil(self.world_size)
        } else {
            bytes
        }
    }

    /// The bytes of the weights that a pass over `model` in `dtype` has gathered at a time: those
    /// of the embedding or the output layer, or of a block and the next one.
    fn gathered(self, model: &DecoderConfig, dtype: DType) -> usize {
        if !self.is_full() {
            return 0;
        }
        let (mut others, mut blocks) = (0, BTreeMap::<String, usize>::new());
        for (name, shape) in model.parameter_shapes() {
            let block = name
                .strip_prefix(LAYERS)
                .and_then(|rest| rest.split_once('.'));
            let elements = shape.elem_count();
            match block {
                Some((number, _)) => *blocks.entry(number.to_owned()).or_default() += elements,
                None => others = elements.max(others),
            }
        }
        let block = blocks.into_values().max().unwrap_or(0);
        others.max(2 * block) * dtype.size_in_bytes()
    }
}

impl Learning<'_> {
    /// The memory of weights, optimizer and backward passes, without other models and sampling.
    pub(crate) fn plan(&self, model: &DecoderConfig) -> Result<MemoryPlan> {
        model.validate()?;
        let shapes: Vec<Shape> = match self.adapters {
            None => model.parameter_shapes().into_values().collect(),
            Some(adapters) => adapter_shapes(adapters, model)?,
        };
        let count: usize = shapes.iter().map(Shape::elem_count).sum();
        let compute = DType::from(self.compute_dtype);
        let copies = count * copy_bytes(self.compute_dtype);
        let divides_weights = divides_weights(
            self.optimizer,
            self.compute_dtype,
            self.adapters.is_some(),
            self.division.sharding,
        );
        // The f32 weights apart from those that the policy computes with.
        let (masters, computed) = match self.optimizer.master_weights {
            MasterWeights::F32 if copies > 0 => (4 * count, copies),
            MasterWeights::F32 => (0, 4 * count),
            MasterWeights::Bf16 => (0, 2 * count),
        };
        let (masters, computed) = if divides_weights {
            let masters = self.division.of_gradients(masters);
            (masters, self.division.of_weights(computed))
        } else {
            (masters, computed)
        };
        let state = self
            .division
            .state(state_bytes(&shapes, self.optimizer.state));
        let (weights, optimizer, host) = if on_host(self.optimizer, self.on_cuda) {
            (computed, 0, masters + state)
        } else {
            (computed + masters, state, 0)
        };
        let frozen = match self.adapters {
            None => 0,
            Some(_) => {
                let bytes = self.base_weights.num_bytes(model, compute)?;
                self.division.of_weights(bytes)
            }
        };
        let gradients = match self.optimizer.gradient_dtype {
            GradientDType::F32 => 4 * count,
            GradientDType::Bf16 => 4 * count - 2 * elements_of_layers(model),
        };
        // Of one matrix of the vocabulary.
        let vocabulary = 4 * model.vocab_size * model.hidden_size;
        let trains = self.adapters.is_none();
        let learner = Learner {
            gradients,
            output: if trains { vocabulary } else { 0 },
            embedding: if trains && !model.tie_word_embeddings {
                vocabulary
            } else {
                0
            },
            has_logits: true,
            distillation: self.distillation,
            compute,
            activation_checkpointing: self.activation_checkpointing,
            activation_offloading: self.activation_offloading,
            on_cuda: self.on_cuda,
            division: self.division,
        };
        let LearnerBytes {
            activations,
            training,
            main_memory,
        } = learner.bytes(model, self.passes)?;
        let loading = if divides_weights {
            // The largest one, or this rank's part of it, as a tensor and as bytes of a file, both
            // in f32.
            let largest = shapes.iter().map(Shape::elem_count).max();
            weights + self.division.of_weights(2 * 4 * largest.unwrap_or(0))
        } else {
            0
        };
        Ok(MemoryPlan {
            loading,
            weights,
            frozen,
            optimizer,
            host: host + main_memory,
            gradients: self.division.of_gradients(gradients),
            activations,
            training,
            ..MemoryPlan::default()
        })
    }
}

/// Returns whether a model on a GPU has the state of its optimizer in main memory.
fn on_host(optimizer: &AdamWConfig, on_cuda: bool) -> bool {
    optimizer.memory == StateMemory::Host && on_cuda
}

/// The bytes of a critic.
struct CriticBytes {
    weights: usize,
    /// State of its optimizer.
    state: usize,
    /// Gradients and tensors at their peak.
    training: usize,
}

fn critic_bytes(
    policy: &DecoderConfig,
    critic: &CriticConfig,
    passes: &[Pass],
    division: Division,
) -> Result<CriticBytes> {
    // It has no output layer.
    let model = DecoderConfig {
        tie_word_embeddings: true,
        ..policy.clone()
    };
    let shapes: Vec<Shape> = model.parameter_shapes().into_values().collect();
    let weights = 4 * shapes.iter().map(Shape::elem_count).sum::<usize>();
    let learner = Learner {
        gradients: weights,
        output: 0,
        embedding: 4 * model.vocab_size * model.hidden_size,
        has_logits: false,
        distillation: None,
        compute: DType::F32,
        activation_checkpointing: ActivationCheckpointing::default(),
        activation_offloading: false,
        on_cuda: cuda_is_enabled(),
        division,
    };
    let LearnerBytes { training, .. } = learner.bytes(&model, passes)?;
    Ok(CriticBytes {
        weights: division.of_weights(weights),
        state: division.state(state_bytes(&shapes, critic.optimizer.state)),
        training,
    })
}

/// A model that trains.
struct Learner<'a> {
    /// The bytes of all gradients.
    gradients: usize,
    /// The bytes of the output layer's gradient, the first of a pass; 0 if it does not train.
    output: usize,
    /// The bytes of the gradient of an embedding that is not the output layer, the last of a pass.
    embedding: usize,
    /// False for a critic.
    has_logits: bool,
    distillation: Option<&'a DistillationLoss>,
    compute: DType,
    activation_checkpointing: ActivationCheckpointing,
    activation_offloading: bool,
    on_cuda: bool,
    division: Division,
}

/// The bytes of a backward pass.
struct LearnerBytes {
    /// Tensors.
    activations: usize,
    /// Tensors and gradients at their peak.
    training: usize,
    /// Tensors that are moved to main memory.
    main_memory: usize,
}

impl Learner<'_> {
    /// The most bytes of any of `passes`.
    fn bytes(&self, model: &DecoderConfig, passes: &[Pass]) -> Result<LearnerBytes> {
        let passes = passes.iter().filter(|pass| pass.tokens > 0);
        let mut most = LearnerBytes {
            activations: 0,
            training: self.division.of_gradients(self.gradients),
            main_memory: 0,
        };
        for pass in passes {
            let bytes = self.bytes_of_pass(model, *pass)?;
            most = LearnerBytes {
                activations: most.activations.max(bytes.activations),
                training: most.training.max(bytes.training),
                main_memory: most.main_memory.max(bytes.main_memory),
            };
        }
        Ok(most)
    }

    fn bytes_of_pass(&self, model: &DecoderConfig, pass: Pass) -> Result<LearnerBytes> {
        let offloading = self.activation_offloading && self.on_cuda;
        let recorded = model.recorded_bytes(
            (pass.tokens, pass.expanded),
            self.compute,
            (self.activation_checkpointing, offloading),
        )?;
        let output = recorded.kept + self.layer(model, pass);
        let blocks = recorded.backward.len();
        let exchange = pass.exchange(model, self.compute);
        let most = recorded.backward.iter().copied().max();
        let activations =
            output.max(most.unwrap_or(0) + exchange) + self.division.gathered(model, self.compute);
        let training = if self.division.divides_gradients() {
            // The sums, and the gradients of a block and of a vocabulary matrix while those of the
            // two blocks above are summed over the ranks and freed. Small blocks are summed
            // together, as many as it takes.
            let of_blocks = self.gradients - self.output - self.embedding;
            let block = (of_blocks / blocks.max(1)).max(1);
            let bucket = block.saturating_mul(BUCKET_BYTES.div_ceil(block));
            let whole = 3 * bucket + self.output.max(self.embedding);
            self.division.of_gradients(self.gradients) + whole.min(self.gradients) + activations
        } else if pass.follows {
            self.gradients + activations
        } else {
            // The gradients of a block are added before those of the block below.
            let of_blocks = self.gradients - self.output - self.embedding;
            let backward = recorded.backward.iter().enumerate();
            let backward = backward
                .map(|(block, bytes)| bytes + exchange + of_blocks * (blocks - block) / blocks);
            self.output + output.max(backward.max().unwrap_or(0))
        };
        Ok(LearnerBytes {
            activations,
            training,
            main_memory: recorded.main_memory,
        })
    }

    /// The bytes of the output layer and its loss, without the gradient of its weight.
    fn layer(&self, model: &DecoderConfig, pass: Pass) -> usize {
        let (tokens, vocab_size, width) = (pass.tokens, model.vocab_size, model.hidden_size);
        let logits = tokens.saturating_mul(vocab_size);
        // The hidden states and their gradient, which is summed in f32.
        let size = self.compute.size_in_bytes();
        let hidden = tokens * width * (2 * size + 4);
        let loss = match (self.has_logits, self.on_cuda) {
            (false, true) => WORKSPACE,
            (false, false) => products(),
            (true, true) => cuda_logits(tokens, vocab_size),
            (true, false) => {
                let shape = (vocab_size, width);
                let has_new_gradient = self.output > 0 && !pass.follows;
                products() + LinearLogProb::cpu_bytes(tokens, shape, self.compute, has_new_gradient)
            }
        };
        // The logits that are compared to count the right answers, in f32.
        let counted = if pass.is_supervised {
            let rounded = if size < 4 { size } else { 0 };
            products() + logits.min(states_at_once(vocab_size) * vocab_size) * (4 + rounded)
        } else {
            0
        };
        let distilled = match self.distillation {
            // The gradient of the term is computed apart, and its sum with the others is a new
            // tensor.
            Some(loss) if !pass.is_supervised => {
                let buffers = linear_distillation_bytes(loss, logits, self.on_cuda);
                self.output + buffers.max(self.output)
            }
            _ => 0,
        };
        hidden + loss.max(counted) + distilled
    }
}

/// The elements of the matrices in the layers.
fn elements_of_layers(model: &DecoderConfig) -> usize {
    let shapes = model.parameter_shapes().into_iter();
    let matrices =
        shapes.filter(|(name, shape)| name.starts_with(LAYERS) && shape.dims().len() == 2);
    matrices.map(|(_, shape)| shape.elem_count()).sum()
}

/// The bytes of the copy of a weight that trains in the dtype of the computation.
fn copy_bytes(dtype: ComputeDType) -> usize {
    match dtype {
        ComputeDType::F32 => 0,
        ComputeDType::Bf16 | ComputeDType::F16 => DType::from(dtype).size_in_bytes(),
    }
}

/// The bytes of the state of an optimizer of parameters of these shapes.
fn state_bytes(shapes: &[Shape], form: StateForm) -> usize {
    shapes.iter().map(|shape| form.num_bytes(shape)).sum()
}

fn adapter_shapes(adapters: &LoraConfig, model: &DecoderConfig) -> Result<Vec<Shape>> {
    Ok(adapters.parameter_shapes(model)?.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_loss::RolloutCorrection;
    use candle_grpo_loss::correction::ImportanceWeight;
    use rstest::rstest;

    /// One layer, whose seven linear maps have 64 x 64 numbers each.
    fn narrow() -> DecoderConfig {
        DecoderConfig {
            hidden_size: 64,
            intermediate_size: 64,
            vocab_size: 100,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn the_output_layer_takes_more_memory_on_cuda() -> Result<()> {
        let model = DecoderConfig {
            vocab_size: 50_000,
            ..narrow()
        };
        let plan = |on_cuda: bool, follows: bool| {
            let pass = Pass {
                tokens: 100,
                expanded: 100,
                follows,
                is_supervised: false,
                exchanged: (0, 0),
            };
            let learning = Learning {
                adapters: None,
                base_weights: BaseWeights::Dense,
                compute_dtype: ComputeDType::Bf16,
                activation_checkpointing: ActivationCheckpointing::default(),
                activation_offloading: false,
                optimizer: &AdamWConfig::default(),
                passes: &[pass],
                distillation: None,
                on_cuda,
                division: Division::new(Sharding::None, 1),
            };
            learning.plan(&model)
        };
        // 100 tokens have logits of 20 MB, which are kept, and are one tile.
        let few = 100 * 50_000 * (4 + 4 + 2) + (64 << 20);
        for follows in [false, true] {
            let shape = (50_000, 64);
            let on_cpu = LinearLogProb::cpu_bytes(100, shape, DType::BF16, !follows) + products();
            let (cuda, cpu) = (plan(true, follows)?, plan(false, follows)?);
            assert_eq!(cuda.activations - cpu.activations, few - on_cpu);
            assert_eq!(cuda.training - cpu.training, few - on_cpu);
        }
        // The gradient of the output layer is added to the one before.
        for on_cuda in [false, true] {
            let passes = plan(on_cuda, true)?;
            assert_eq!(passes.training, passes.gradients + passes.activations);
        }
        // Those of 65,536 tokens are beyond all bounds: 2048 + 256 + 128 MiB.
        assert_eq!(cuda_logits(65_536, 50_000), 2496 << 20);
        // But a tile has 1024 columns of any number of rows.
        let tile = 100_000 * 1024 * (4 + 2);
        let most = (2048 << 20) + tile + (64 << 20);
        assert_eq!(cuda_logits(100_000, 50_000), most);
        Ok(())
    }

    #[test]
    fn each_thread_of_a_program_has_pages_of_its_own() -> Result<()> {
        let model = DecoderConfig {
            vocab_size: 100,
            num_hidden_layers: 1,
            ..DecoderConfig::default()
        };
        let plan = MemoryPlan::new(&model, &TrainConfig::default(), 10, 0)?;
        let allocator = |threads: usize| -> Result<usize> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            Ok(pool.build()?.install(|| plan.in_program(0).allocator))
        };
        // 5 to 18 MiB were measured for one more thread (docs/llm.md).
        let more = allocator(4)? - allocator(1)?;
        assert!((3 * (5 << 20)..=3 * (18 << 20)).contains(&more), "{more}");
        Ok(())
    }

    /// Weights are packed after 16 decoding steps. The first token of a completion is from the pass
    /// over its prompt.
    #[rstest]
    #[case::one_batch(17, 64, false)]
    #[case::one_step_more(18, 64, true)]
    #[case::two_batches(10, 32, true)]
    fn weights_are_packed_in_long_draws_alone(
        #[case] max_new_tokens: usize,
        #[case] max_batch_size: usize,
        #[case] is_packed: bool,
    ) -> Result<()> {
        let config = TrainConfig {
            prompts_per_step: 8,
            num_generations: 8,
            sampling: SamplingConfig {
                max_new_tokens,
                max_batch_size,
                ..SamplingConfig::default()
            },
            ..TrainConfig::default()
        };
        let model = DecoderConfig {
            vocab_size: 100,
            num_hidden_layers: 1,
            ..DecoderConfig::default()
        };
        let plan = MemoryPlan::new(&model, &config, 10, 0)?;
        assert_eq!(plan.packed > 0, is_packed && !cuda_is_enabled());
        Ok(())
    }

    /// In bf16, weights take 4 + 2 bytes, gradients 4, and the state of the optimizer 8.
    #[rstest]
    #[case::none(Sharding::None, [6, 4, 8], [6., 4., 8.])]
    #[case::optimizer(Sharding::Optimizer, [6, 4, 8], [6., 4., 1.])]
    #[case::resident(Sharding::Resident, [6, 4, 8], [2.5, 0.5, 1.])]
    #[case::full(Sharding::Full, [6, 4, 8], [0.75, 0.5, 1.])]
    fn ranks_keep_their_shares(
        #[case] sharding: Sharding,
        #[case] alone: [usize; 3],
        #[case] of_eight: [f64; 3],
    ) -> Result<()> {
        let model = DecoderConfig {
            vocab_size: 100,
            num_hidden_layers: 1,
            ..DecoderConfig::default()
        };
        let shapes = model.parameter_shapes();
        let all: usize = shapes.values().map(Shape::elem_count).sum();
        let config = TrainConfig {
            compute_dtype: ComputeDType::Bf16,
            sharding,
            ..TrainConfig::default()
        };
        let plan = |world_size| MemoryPlan::of_rank(&model, &config, (10, 0), world_size);
        let parts = |plan: MemoryPlan| [plan.weights, plan.gradients, plan.optimizer];
        assert_eq!(parts(plan(1)?), alone.map(|bytes| bytes * all));
        for (found, bytes) in parts(plan(8)?).into_iter().zip(of_eight) {
            assert!((found as f64 - bytes * all as f64).abs() <= 1., "{found}");
        }
        // A weight is whole in f32 while it is divided.
        let largest = shapes.values().map(Shape::elem_count).max();
        let eight = plan(8)?;
        let loading = match sharding {
            Sharding::Resident => eight.weights + 8 * largest.unwrap_or(0),
            // A rank reads its part.
            Sharding::Full => eight.weights + largest.unwrap_or(0),
            _ => 0,
        };
        assert_eq!(eight.loading, loading);
        assert!(eight.peak() >= loading);
        // All gradients are smaller than the buffers, and whole before they are divided.
        if matches!(sharding, Sharding::Resident | Sharding::Full) {
            assert_eq!(
                eight.training,
                eight.gradients + 4 * all + eight.activations
            );
        }
        assert_eq!(plan(1)?.loading, 0);
        // All weights are gathered while completions are drawn.
        let is_full = sharding == Sharding::Full;
        assert_eq!(eight.held, if is_full { 2 * all } else { 0 });
        assert_eq!(plan(1)?.held, 0);
        let error = plan(0).unwrap_err().to_string();
        assert!(
            error.starts_with("world_size: 0, must be at least 1"),
            "{error}"
        );
        Ok(())
    }

    #[test]
    fn offloaded_inputs_are_beside_a_gpu() -> Result<()> {
        let (layers, hidden, tokens) = (8, 64, 1 << 10);
        let model = DecoderConfig {
            hidden_size: hidden,
            num_hidden_layers: layers,
            ..narrow()
        };
        let pass = Pass {
            tokens,
            expanded: tokens,
            follows: false,
            is_supervised: false,
            exchanged: (0, 0),
        };
        // The second pass needs less.
        let passes = [pass, Pass { tokens: 10, ..pass }];
        let plan = |recomputed, activation_offloading, on_cuda| {
            let learning = Learning {
                adapters: None,
                base_weights: BaseWeights::Dense,
                compute_dtype: ComputeDType::Bf16,
                activation_checkpointing: ActivationCheckpointing::Layers(recomputed),
                activation_offloading,
                optimizer: &AdamWConfig::default(),
                passes: &passes,
                distillation: None,
                on_cuda,
                division: Division::new(Sharding::None, 1),
            };
            learning.plan(&model)
        };
        let input = 2 * hidden * tokens;
        for recomputed in [1, 2, 5, layers] {
            let (kept, moved) = (
                plan(recomputed, false, true)?,
                plan(recomputed, true, true)?,
            );
            assert_eq!((kept.host, moved.host), (0, recomputed * input));
            // The one in use and the next one are on the device as well.
            let gone = recomputed.saturating_sub(2) * input;
            assert_eq!(kept.activations - moved.activations, gone, "{recomputed}");
            assert_eq!(
                plan(recomputed, true, false)?,
                plan(recomputed, false, false)?
            );
        }
        Ok(())
    }

    /// The weights on a GPU, and main memory, in bytes for each parameter.
    #[rstest]
    #[case::f32(ComputeDType::F32, MasterWeights::F32, [4, 8])]
    #[case::bf16(ComputeDType::Bf16, MasterWeights::F32, [2, 12])]
    #[case::rounded(ComputeDType::Bf16, MasterWeights::Bf16, [2, 8])]
    fn an_optimizer_in_host_memory_is_beside_a_gpu(
        #[case] compute_dtype: ComputeDType,
        #[case] master_weights: MasterWeights,
        #[case] expected: [usize; 2],
    ) -> Result<()> {
        let model = DecoderConfig {
            vocab_size: 100,
            num_hidden_layers: 1,
            ..DecoderConfig::default()
        };
        let plan = |memory, on_cuda| {
            let optimizer = AdamWConfig {
                master_weights,
                memory,
                ..AdamWConfig::default()
            };
            let learning = Learning {
                adapters: None,
                base_weights: BaseWeights::Dense,
                compute_dtype,
                activation_checkpointing: ActivationCheckpointing::default(),
                activation_offloading: false,
                optimizer: &optimizer,
                passes: &[],
                distillation: None,
                on_cuda,
                division: Division::new(Sharding::None, 1),
            };
            learning.plan(&model)
        };
        let shapes = model.parameter_shapes();
        let all: usize = shapes.values().map(Shape::elem_count).sum();
        let (gpu, device) = (
            plan(StateMemory::Host, true)?,
            plan(StateMemory::Device, true)?,
        );
        assert_eq!([gpu.weights, gpu.host], expected.map(|bytes| bytes * all));
        assert_eq!((gpu.optimizer, device.host), (0, 0));
        assert_eq!(device.peak() - gpu.peak(), gpu.host);
        assert_eq!(
            plan(StateMemory::Host, false)?,
            plan(StateMemory::Device, false)?
        );
        Ok(())
    }

    #[test]
    fn draws_in_another_dtype_take_a_copy_of_what_is_not_in_blocks() -> Result<()> {
        let model = DecoderConfig {
            tie_word_embeddings: true,
            ..narrow()
        };
        let all: usize = model
            .parameter_shapes()
            .values()
            .map(Shape::elem_count)
            .sum();
        let copies = |mut config: TrainConfig| -> Result<usize> {
            let plain = MemoryPlan::new(&model, &config, 10, 0)?;
            config.rollout.dtype = Some(ComputeDType::Bf16);
            let drawn = MemoryPlan::new(&model, &config, 10, 0)?;
            assert_eq!(drawn.frozen, plain.frozen);
            Ok(drawn.weights - plain.weights)
        };
        assert_eq!(copies(TrainConfig::default())?, 2 * all);

        let mut config = TrainConfig {
            adapters: Some(LoraConfig::all_linear(8, 16.)),
            ..TrainConfig::default()
        };
        let adapters: usize = adapter_shapes(&LoraConfig::all_linear(8, 16.), &model)?
            .iter()
            .map(Shape::elem_count)
            .sum();
        assert_eq!(copies(config.clone())?, 2 * (all + adapters));

        // The linear maps of the block are in blocks of numbers: seven of 64 x 64.
        config.base_weights = BaseWeights::Q8_0;
        assert_eq!(copies(config)?, 2 * (all - 7 * 64 * 64 + adapters));
        Ok(())
    }

    /// Each of the seven maps has 64 x 64 numbers. Over weights in blocks, the copies are dense.
    #[rstest]
    #[case::f32(ComputeDType::F32, None, BaseWeights::Dense, 4, 0)]
    #[case::bf16(ComputeDType::Bf16, None, BaseWeights::Dense, 2, 0)]
    #[case::of_blocks(ComputeDType::Bf16, None, BaseWeights::Q8_0, 2, 0)]
    #[case::in_bf16(ComputeDType::F32, Some(ComputeDType::Bf16), BaseWeights::Dense, 2, 2)]
    #[case::of_blocks_in_bf16(ComputeDType::F32, Some(ComputeDType::Bf16), BaseWeights::Q8_0, 2, 2)]
    fn merged_adapters_take_a_copy_of_the_weights_that_they_extend(
        #[case] compute_dtype: ComputeDType,
        #[case] drawn_in: Option<ComputeDType>,
        #[case] base_weights: BaseWeights,
        #[case] of_map: usize,
        #[case] of_others: usize,
        #[values(7, 2)] maps: usize,
    ) -> Result<()> {
        let model = narrow();
        let mut adapters = LoraConfig::all_linear(8, 16.);
        if maps == 2 {
            adapters.target_modules = vec!["q_proj".to_owned(), "up_proj".to_owned()];
        }
        let mut config = TrainConfig {
            adapters: Some(adapters),
            base_weights,
            compute_dtype,
            ..TrainConfig::default()
        };
        let plain = MemoryPlan::new(&model, &config, 10, 0)?;
        config.rollout.dtype = drawn_in;
        config.rollout.merge_adapters = true;
        let merged = MemoryPlan::new(&model, &config, 10, 0)?;
        let map = 64 * 64;
        let shapes = model.parameter_shapes();
        let outer: usize = shapes.values().map(Shape::elem_count).sum::<usize>() - 7 * map;
        // Other maps are shared if they are in blocks.
        let other_maps = match base_weights {
            BaseWeights::Dense => 7 - maps,
            _ => 0,
        };
        let copies = maps * map * of_map + (outer + other_maps * map) * of_others;
        assert_eq!(merged.weights - plain.weights, copies);
        assert_eq!(merged.frozen, plain.frozen);
        if !cuda_is_enabled() {
            let size = DType::from(drawn_in.unwrap_or(compute_dtype)).size_in_bytes();
            let dense = match base_weights {
                BaseWeights::Dense => 7,
                _ => maps,
            };
            assert_eq!(merged.packed, (dense * map + 100 * 64) * size);
        }
        config.rollout.max_staleness = 1;
        config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
            weight: Some(ImportanceWeight::truncated(2.)),
            ..RolloutCorrection::default()
        });
        let ahead = MemoryPlan::new(&model, &config, 10, 0)?;
        assert_eq!(ahead.weights - plain.weights, 2 * copies);
        Ok(())
    }

    #[test]
    fn the_largest_weight_is_merged_in_f32() -> Result<()> {
        let model = DecoderConfig {
            intermediate_size: 4096,
            vocab_size: 4,
            ..narrow()
        };
        let mut config = TrainConfig {
            prompts_per_step: 1,
            num_generations: 2,
            adapters: Some(LoraConfig::all_linear(8, 16.)),
            compute_dtype: ComputeDType::Bf16,
            ..TrainConfig::default()
        };
        config.rollout.merge_adapters = true;
        let merged = config.merged_bytes(&model)?.map(|merged| merged.merging);
        assert_eq!(merged, Some(64 * 4096 * (4 + 2)));
        config.rollout.merge_adapters = false;
        assert_eq!(config.merged_bytes(&model)?, None);
        Ok(())
    }
}
