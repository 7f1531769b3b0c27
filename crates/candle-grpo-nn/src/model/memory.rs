//! Estimates a decoder's memory from its configuration.

use candle_core::{DType, Result};
use candle_grpo_kernels::{PAGE, PackedWeight};

use crate::config::architecture::{
    AttentionPlan, BlockPlan, ChannelPlan, GatedDeltaPlan, TokenMixerPlan, linear_maps,
};
use crate::decoding::pages_for;
use crate::weights::base_weights::FrozenForm;
use crate::{BaseWeights, DecoderConfig};

impl DecoderConfig {
    /// Bytes that [`LanguageModel::record`](crate::LanguageModel::record) keeps for `tokens` tokens
    /// in `dtype`, plus the backward pass's peak, without parameter gradients. With
    /// `activation_checkpointing`, only each block's input is kept.
    pub fn recorded_bytes(
        &self,
        tokens: usize,
        dtype: DType,
        activation_checkpointing: bool,
    ) -> usize {
        let hidden = self.hidden_size;
        let blocks = self.architecture().blocks;
        let of_block = |block: &BlockPlan| block.recorded(hidden);
        let most = blocks.iter().map(of_block).max().unwrap_or(0);
        let kept: usize = if activation_checkpointing {
            blocks.len() * hidden + most
        } else {
            blocks.iter().map(of_block).sum()
        };
        // While a block is computed: the gradients in one channel mixer and the hidden-state
        // gradients.
        let channel = |block: &BlockPlan| block.mlp.mixer.inner();
        let temporary = 3 * blocks.iter().map(channel).max().unwrap_or(0) + 2 * hidden;
        tokens * (kept + temporary) * dtype.size_in_bytes()
    }

    /// Bytes for a cache with `groups` prompts, `prompt` tokens each, and `group_size` completions
    /// per prompt, `response` tokens each.
    pub fn cache_bytes(
        &self,
        (groups, group_size): (usize, usize),
        (prompt, response): (usize, usize),
        dtype: DType,
    ) -> usize {
        // Each completion starts its own page.
        let pages = groups * (prompt.div_ceil(PAGE) + group_size * response.div_ceil(PAGE));
        let position = |attention: &AttentionPlan| {
            2 * (attention.inputs.maps[1].outputs) * dtype.size_in_bytes()
        };
        let state = |delta: &GatedDeltaPlan| {
            let heads = delta.heads;
            let state = heads.value_heads * heads.key_dim * heads.value_dim;
            (state + (delta.taps - 1) * heads.width()) * DType::F32.size_in_bytes()
        };
        let of_block = |block: BlockPlan| match &block.tokens.mixer {
            TokenMixerPlan::Attention(attention) => pages_for(pages) * PAGE * position(attention),
            TokenMixerPlan::GatedDelta(delta) => groups * (group_size + 1) * state(delta),
        };
        self.architecture().blocks.into_iter().map(of_block).sum()
    }

    /// Bytes for the weight copies that
    /// [`PagedCache::pack_weights`](crate::PagedCache::pack_weights) makes on the CPU, with base
    /// weights in the form `base` and all others in `dtype`. [`BaseWeights::Stored`] counts as
    /// dense.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16.
    pub fn packed_bytes(&self, base: BaseWeights, dtype: DType) -> Result<usize> {
        let form = FrozenForm::new(self, base, dtype)?;
        if !PackedWeight::copies(dtype) {
            return Ok(0);
        }
        let maps = linear_maps(self).into_iter();
        let maps = maps
            .filter(|(name, shape)| form.block_type(&format!("{name}.weight"), shape).is_none());
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
        let tokens = match &self.tokens.mixer {
            TokenMixerPlan::Attention(attention) => attention.recorded(),
            TokenMixerPlan::GatedDelta(delta) => delta.recorded(),
        };
        inputs + tokens + self.mlp.mixer.recorded(hidden)
    }
}

impl AttentionPlan {
    fn recorded(&self) -> usize {
        let [_, key, value] = self.inputs.maps.each_ref().map(|map| map.outputs);
        // Inputs to the output map. The query map may also have gates.
        let query = self.output.inputs;
        let before_norms = if self.norms.is_some() { query + key } else { 0 };
        let gates = if self.output_gate { 2 * query } else { 0 };
        2 * query + key + value + before_norms + gates
    }
}

impl GatedDeltaPlan {
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
