//! Estimates a decoder's memory from its configuration.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Shape};
use candle_grpo_kernels::{
    PAGE, PackedWeight, PagedBatch, TensorStack, rows_without_rest, with_room,
};

use crate::config::architecture::{
    AttentionPlan, BlockPlan, ChannelPlan, GatedDeltaPlan, TokenMixerPlan, linear_maps,
};
use crate::decoding::{MORE_ROWS, pages_for, pages_in_place, slots_in_place};
use crate::weights::base_weights::FrozenForm;
use crate::{ActivationCheckpointing, BaseWeights, DecoderConfig, LoraConfig};

/// Memory of a GPU is mapped in multiples of this number of bytes.
const MAPPED_BYTES: usize = 2 << 20;

/// Memory for a recorded pass, in bytes, without parameter gradients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedBytes {
    /// Tensors that the backward pass needs from the forward pass.
    pub kept: usize,
    /// Tensors while each block's gradients are computed, at their peak: those that are kept for
    /// this block and the blocks before it, and further ones. For a checkpointed block these
    /// include the recomputed block.
    pub backward: Vec<usize>,
    /// Page-locked main memory, if the inputs of checkpointed blocks are moved there.
    pub main_memory: usize,
}

/// Memory for weights with merged adapters, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergedBytes {
    /// The copies.
    pub copies: usize,
    /// The largest weight in f32, and rounded, while it is merged.
    pub merging: usize,
}

impl DecoderConfig {
    /// Memory for [`Lora::merged_var_builder`](crate::Lora::merged_var_builder) with `dtype` and
    /// these adapters. Base weights are in the form `base`, and dense ones in `base_dtype`.
    /// [`BaseWeights::Stored`] counts as dense.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16, or the adapters are not valid for this model.
    pub fn merged_bytes(
        &self,
        adapters: &LoraConfig,
        (base, base_dtype): (BaseWeights, DType),
        dtype: DType,
    ) -> Result<MergedBytes> {
        adapters.validate(self)?;
        let form = FrozenForm::new(self, base, dtype)?;
        let merged = adapters.maps(self);
        let merged: BTreeMap<_, _> = merged
            .map(|(module, shape)| (format!("{module}.weight"), shape.elem_count()))
            .collect();
        let is_copied = |name: &String, shape: &Shape| {
            let is_dense = form.block_type(name, shape).is_none();
            merged.contains_key(name) || is_dense && base_dtype != dtype
        };
        let copied = self.parameter_shapes().into_iter();
        let copied = copied.filter(|(name, shape)| is_copied(name, shape));
        let elements: usize = copied.map(|(_, shape)| shape.elem_count()).sum();
        let largest = merged.into_values().max().unwrap_or(0);
        let (size, wide) = (dtype.size_in_bytes(), DType::F32.size_in_bytes());
        let rounded = if dtype == DType::F32 { 0 } else { size };
        Ok(MergedBytes {
            copies: elements * size,
            merging: largest * (wide + rounded),
        })
    }

    /// Memory for [`LanguageModel::record`](crate::LanguageModel::record) and its backward pass
    /// over `tokens` tokens in `dtype`. Attention computes `expanded` tokens: it counts shared
    /// prefixes once per sequence. `offloading` is for a GPU, as in
    /// [`Decoder::with_activation_offloading`](crate::Decoder::with_activation_offloading).
    ///
    /// # Errors
    ///
    /// If the model has fewer layers than `checkpointing`.
    pub fn recorded_bytes(
        &self,
        (tokens, expanded): (usize, usize),
        dtype: DType,
        (checkpointing, offloading): (ActivationCheckpointing, bool),
    ) -> Result<RecordedBytes> {
        let hidden = self.hidden_size;
        let blocks = self.architecture().blocks;
        let recomputed_blocks = checkpointing.layers(self)?;
        // The last norm has an input, too.
        let mut kept = hidden;
        let backward = blocks.iter().enumerate().map(|(number, block)| {
            let recorded = block.recorded(hidden);
            let recomputed = if number < recomputed_blocks {
                // Of inputs in main memory, a few are on the device as well.
                if !offloading || number < TensorStack::ON_DEVICE {
                    kept += hidden;
                }
                recorded
            } else {
                kept += recorded;
                0
            };
            // The gradients with respect to a block's input and output.
            let others = tokens * (kept + recomputed + 2 * hidden);
            (others + block.backward(tokens, expanded)) * dtype.size_in_bytes()
        });
        let backward = backward.collect();
        let main_memory = if offloading {
            let input = tokens * hidden * dtype.size_in_bytes();
            recomputed_blocks * TensorStack::main_memory_bytes(input)
        } else {
            0
        };
        Ok(RecordedBytes {
            kept: tokens * kept * dtype.size_in_bytes(),
            backward,
            main_memory,
        })
    }

    /// Bytes for the tensors of a pass over `tokens` tokens without gradients, at its peak.
    pub fn forward_bytes(&self, tokens: usize, dtype: DType) -> usize {
        let blocks = self.architecture().blocks;
        let mixers = blocks.iter().map(|block| {
            let channel = block.mlp.mixer.recorded(self.hidden_size);
            channel.max(block.tokens.mixer.recorded())
        });
        // The block's input, the change to it, and a mixer's input and output.
        let hidden = 4 * self.hidden_size;
        tokens * (hidden + mixers.max().unwrap_or(0)) * dtype.size_in_bytes()
    }

    /// Bytes on a GPU for the tensors of a decoding step with `rows` completions, at its peak.
    /// Their prompts have `prompt` tokens each, and they have `response` tokens each.
    pub fn step_bytes(
        &self,
        rows: usize,
        (prompt, response): (usize, usize),
        dtype: DType,
    ) -> usize {
        let rows = with_room(rows, MORE_ROWS);
        let of_block = |block: BlockPlan| match &block.tokens.mixer {
            TokenMixerPlan::Attention(plan) => {
                let heads = plan.output.inputs / plan.head_dim;
                PagedBatch::partial_bytes((rows, heads), plan.head_dim, (prompt, response))
            }
            TokenMixerPlan::GatedDelta(_) => 0,
        };
        let partial = self.architecture().blocks.into_iter().map(of_block).max();
        self.forward_bytes(rows, dtype) + partial.unwrap_or(0)
    }

    /// Bytes for a cache with `groups` prompts, `prompt` tokens each, and `group_size` completions
    /// per prompt, `response` tokens each. With `on_cuda`, its pages grow in place.
    pub fn cache_bytes(
        &self,
        (groups, group_size): (usize, usize),
        (prompt, response): (usize, usize),
        dtype: DType,
        on_cuda: bool,
    ) -> usize {
        // Each completion starts its own page.
        let pages = groups * (prompt.div_ceil(PAGE) + group_size * response.div_ceil(PAGE));
        let of_block = |block: BlockPlan| match &block.tokens.mixer {
            TokenMixerPlan::Attention(plan) if on_cuda => {
                // The keys or the values of a page fill the mapped memory in a whole block.
                let block = rows_without_rest(plan.page_bytes(dtype) / 2, MAPPED_BYTES);
                pages_in_place(pages, block) * plan.page_bytes(dtype)
            }
            TokenMixerPlan::Attention(plan) => pages_for(pages) * plan.page_bytes(dtype),
            TokenMixerPlan::GatedDelta(plan) if on_cuda => {
                let slots = slots_in_place(groups * (group_size + 1));
                let mapped = |bytes: usize| (slots * bytes).next_multiple_of(MAPPED_BYTES);
                plan.state_bytes().map(mapped).iter().sum()
            }
            TokenMixerPlan::GatedDelta(plan) => {
                groups * (group_size + 1) * plan.state_bytes().iter().sum::<usize>()
            }
        };
        self.architecture().blocks.into_iter().map(of_block).sum()
    }

    /// Bytes for the weight copies that
    /// [`PagedCache::pack_weights`](crate::PagedCache::pack_weights) makes on the CPU, with base
    /// weights in the form `base` and all others in `dtype`. [`BaseWeights::Stored`] counts as
    /// dense, and so do weights with `merged` adapters.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16.
    pub fn packed_bytes(
        &self,
        (base, merged): (BaseWeights, Option<&LoraConfig>),
        dtype: DType,
    ) -> Result<usize> {
        let form = FrozenForm::new(self, base, dtype)?;
        if !PackedWeight::copies(dtype) {
            return Ok(0);
        }
        let is_dense = |name: &str, shape: &Shape| {
            let is_merged = merged.is_some_and(|adapters| adapters.targets(name));
            is_merged || form.block_type(&format!("{name}.weight"), shape).is_none()
        };
        let maps = linear_maps(self).into_iter();
        let maps = maps.filter(|(name, shape)| is_dense(name, shape));
        let elements: usize = maps.map(|(_, shape)| shape.elem_count()).sum();
        Ok((elements + self.vocab_size * self.hidden_size) * dtype.size_in_bytes())
    }
}

impl BlockPlan {
    /// Elements per token that a recorded pass keeps.
    fn recorded(&self, hidden: usize) -> usize {
        let norms = [
            &self.tokens.before,
            &self.tokens.after,
            &self.mlp.before,
            &self.mlp.after,
        ];
        // Input to each mixer and each norm.
        let inputs = 2 * hidden + norms.into_iter().flatten().count() * hidden;
        inputs + self.tokens.mixer.recorded() + self.mlp.mixer.recorded(hidden)
    }

    /// Elements that the backward pass computes within either mixer.
    fn backward(&self, tokens: usize, expanded: usize) -> usize {
        let mixer = match &self.tokens.mixer {
            TokenMixerPlan::Attention(attention) => attention.backward(tokens, expanded),
            TokenMixerPlan::GatedDelta(_) => 0,
        };
        // Gradients with respect to the inner width and to gate and up.
        mixer.max(3 * tokens * self.mlp.mixer.inner())
    }
}

impl TokenMixerPlan {
    fn recorded(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.recorded(),
            Self::GatedDelta(delta) => delta.recorded(),
        }
    }
}

impl AttentionPlan {
    /// Bytes for a page of keys and values in `dtype`.
    pub(crate) fn page_bytes(&self, dtype: DType) -> usize {
        PAGE * 2 * self.inputs.maps[1].outputs * dtype.size_in_bytes()
    }

    fn recorded(&self) -> usize {
        let [_, key, value] = self.inputs.maps.each_ref().map(|map| map.outputs);
        // Inputs to the output map. The query map may also have gates.
        let query = self.output.inputs;
        let before_norms = if self.norms.is_some() { query + key } else { 0 };
        let gates = if self.output_gate { 2 * query } else { 0 };
        2 * query + key + value + before_norms + gates
    }

    fn backward(&self, tokens: usize, expanded: usize) -> usize {
        let [_, key, value] = self.inputs.maps.each_ref().map(|map| map.outputs);
        let query = self.output.inputs;
        let inputs = query + key + value;
        // Gradients with respect to the operator's output and inputs.
        let gradients = query + inputs;
        if expanded > tokens {
            expanded * (inputs + gradients) + tokens * gradients
        } else {
            tokens * gradients
        }
    }
}

impl GatedDeltaPlan {
    /// Bytes for a sequence's state, and for its rows before the convolution.
    pub(crate) fn state_bytes(&self) -> [usize; 2] {
        let heads = self.heads;
        let state = heads.value_heads * heads.key_dim * heads.value_dim;
        let window = (self.taps - 1) * heads.width();
        [state, window].map(|elements| elements * DType::F32.size_in_bytes())
    }

    fn recorded(&self) -> usize {
        let inputs: usize = self.inputs.maps.iter().map(|map| map.outputs).sum();
        // The convolution, two f32 gates per head, the output, and the gated output.
        inputs + self.heads.width() + 4 * self.heads.value_heads + 2 * self.output.inputs
    }
}

impl ChannelPlan {
    /// Inner width per token, summed over all experts that process it.
    fn inner(&self) -> usize {
        match self {
            Self::Mlp(mlp) => mlp.down.inputs,
            Self::Experts(plan) => {
                let widest = plan.experts.iter().map(|mlp| mlp.down.inputs).max();
                plan.routing.top_k() * widest.unwrap_or(0)
            }
        }
    }

    fn recorded(&self, hidden: usize) -> usize {
        let inner = 3 * self.inner();
        match self {
            Self::Mlp(_) => inner,
            // Inputs and outputs of a token's experts, and the router logits.
            Self::Experts(plan) => inner + 2 * plan.routing.top_k() * hidden + plan.router.outputs,
        }
    }
}
