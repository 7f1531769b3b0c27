//! The memory of a run, computed before it starts.

use anyhow::Result;
use candle_core::{DType, Shape};
use candle_grpo_nn::{DecoderConfig, LoraConfig};

use super::micro_batches::MicroBatchSize;
use super::recipe_inputs::RecipeInputs;
use crate::{ComputeDType, TrainConfig};

/// Tiles of logits, and buffers of matrix products.
const BUFFERS: usize = 8 << 20;

/// The bytes that a run takes in the memory of its device, if every completion has the largest
/// length and every prompt is as long as the longest one.
///
/// Not counted are the program with its data set and tokenizer, unless [`Self::program`] is set,
/// and reward models.
///
/// ```
/// use candle_grpo_nn::DecoderConfig;
/// use candle_grpo_train::TrainConfig;
/// use candle_grpo_train::learn::MemoryPlan;
///
/// let model = DecoderConfig { vocab_size: 1000, hidden_size: 64, intermediate_size: 128,
///     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
///     ..DecoderConfig::default() };
/// let plan = MemoryPlan::new(&model, &TrainConfig::default(), 100)?;
/// assert_eq!(plan.gradients, plan.weights);
/// assert_eq!(plan.optimizer, 2 * plan.weights);
/// assert!(plan.peak() > plan.weights + plan.optimizer);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights of the policy that train, in f32, and copies in the dtype of the computation.
    pub weights: usize,
    /// Weights of the policy that do not train, in their form.
    ///
    /// [`BaseWeights::Stored`](candle_grpo_nn::BaseWeights::Stored) counts as dense weights: the
    /// blocks of a file are not known here, but from
    /// [`Gguf::frozen_bytes`](candle_grpo_nn::Gguf::frozen_bytes).
    pub frozen: usize,
    /// Weights of the reference, unless it shares those of the policy.
    pub reference: usize,
    /// Weights of the critic, and the state of its optimizer.
    pub critic: usize,
    /// State of the optimizer of the policy.
    pub optimizer: usize,
    /// Gradients, while the policy trains.
    pub gradients: usize,
    /// Tensors of the longest backward pass.
    pub activations: usize,
    /// Gradients and activations together, at their peak.
    pub training: usize,
    /// The cache of keys and values and the logits, while completions are drawn.
    pub sampling: usize,
    /// The program, its data set, its tokenizer and what the allocator keeps, in main memory: 0
    /// unless the caller sets it.
    pub program: usize,
}

impl MemoryPlan {
    /// Computes the memory of a run of `model` whose longest prompt has `prompt_tokens` tokens.
    ///
    /// # Errors
    ///
    /// If `config` or its adapters are not valid.
    pub fn new(model: &DecoderConfig, config: &TrainConfig, prompt_tokens: usize) -> Result<Self> {
        config.validate()?;
        model.validate()?;
        let shapes: Vec<Shape> = model.parameter_shapes().into_values().collect();
        let all: usize = shapes.iter().map(Shape::elem_count).sum();
        let trained: Vec<Shape> = match &config.adapters {
            None => shapes.clone(),
            Some(adapters) => adapter_shapes(adapters, model)?,
        };
        let count: usize = trained.iter().map(Shape::elem_count).sum();
        let compute = DType::from(config.compute_dtype);
        let copy = match config.compute_dtype {
            ComputeDType::F32 => 0,
            _ => compute.size_in_bytes(),
        };
        let frozen = match config.adapters {
            None => 0,
            Some(_) => config.base_weights.num_bytes(model, compute)?,
        };
        let inputs = RecipeInputs::new(&config.recipe);
        let state = |shapes: &[Shape], form: candle_grpo_nn::optim::StateForm| {
            let shapes = shapes.iter();
            shapes.map(|shape| form.num_bytes(shape)).sum::<usize>()
        };
        let critic = config.critic.as_ref();
        let read = |groups: usize, sequences: usize| {
            groups * prompt_tokens + sequences * config.sampling.max_new_tokens.saturating_sub(1)
        };
        let (group, step) = (config.num_generations, config.prompts_per_step);
        let sequence = read(1, 1);
        let whole = read(step, step * group);
        let mini = config.mini_batch_size.map_or(whole, |size| {
            read(size.div_ceil(group).min(step), size.min(step * group))
        });
        let longest = match config.micro_batches() {
            MicroBatchSize::Tokens(tokens) => tokens.max(sequence),
            MicroBatchSize::Sequences(size) => read(size.div_ceil(group), size),
        }
        .min(mini);
        let recorded = model.recorded_bytes(longest, compute, config.activation_checkpointing);
        // Hidden states and their gradient, which is summed in f32.
        let hidden = longest * model.hidden_size * (2 * compute.size_in_bytes() + 4);
        let activations = recorded + hidden + BUFFERS;
        let gradients = 4 * count;
        let training = match (longest < mini, &config.adapters) {
            (true, _) | (_, Some(_)) => gradients + activations,
            // In a single pass the gradients replace the activations, the output layer's first.
            (false, None) => gradients.max(activations + 4 * model.vocab_size * model.hidden_size),
        };
        let drawn = (step * group).min(config.sampling.max_batch_size);
        let lengths = (prompt_tokens, config.sampling.max_new_tokens);
        let cache = model.cache_bytes((drawn.div_ceil(group), group), lengths, compute);
        Ok(Self {
            weights: count * (4 + copy),
            frozen,
            reference: match (&config.adapters, inputs.reference) {
                (None, true) => all * (4 + copy),
                _ => 0,
            },
            critic: critic.map_or(0, |critic| 4 * all + state(&shapes, critic.optimizer.state)),
            optimizer: state(&trained, config.optimizer.state),
            gradients,
            activations,
            training,
            sampling: cache + drawn * model.vocab_size * 4 + BUFFERS,
            program: 0,
        })
    }

    /// The bytes at the peak: drawing and training alternate.
    pub fn peak(&self) -> usize {
        let kept = self.weights + self.frozen + self.reference + self.critic + self.optimizer;
        self.program + kept + self.training.max(self.sampling)
    }
}

fn adapter_shapes(adapters: &LoraConfig, model: &DecoderConfig) -> Result<Vec<Shape>> {
    Ok(adapters.parameter_shapes(model)?.into_values().collect())
}
