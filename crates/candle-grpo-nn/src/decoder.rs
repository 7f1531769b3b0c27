//! The decoder: token ids in, hidden states and logits out.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_kernels::embedding;
use candle_nn::VarBuilder;

use crate::attention::{Attention, Pass};
use crate::frozen_linear::linear;
use crate::kv_cache::KvCache;
use crate::mlp::Mlp;
use crate::norm::RmsNorm;
use crate::rope::Rope;
use crate::{DecoderConfig, mask};

/// A decoder-only transformer in the layout of Hugging Face's Llama: RMSNorm, rotary positions, grouped-query
/// attention, SwiGLU; with what [`ModelType`](crate::ModelType) adds for Qwen2, Qwen3 and SmolLM3.
///
/// Every operator differentiates. Built from [`Parameters::var_builder`](crate::Parameters::var_builder) it records
/// a graph; built from [`Parameters::detached_var_builder`](crate::Parameters::detached_var_builder) it does not.
///
/// It computes in the dtype of the builder; normalisation, rotation and softmax in f32 at least. A builder that
/// casts (`VarBuilder::to_dtype`) makes its cast copies here, once: build the decoder anew after the variables
/// change.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: DecoderConfig,
    pub(crate) embedding: Tensor,
    pub(crate) blocks: Vec<Block>,
    pub(crate) norm: RmsNorm,
    output: Tensor,
    pub(crate) rope: Rope,
}

#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) attention_norm: RmsNorm,
    pub(crate) attention: Attention,
    pub(crate) mlp_norm: RmsNorm,
    pub(crate) mlp: Mlp,
}

impl Decoder {
    /// Takes the weights from `vb` under the names of [`DecoderConfig::parameter_shapes`].
    pub fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        if !vb.dtype().is_float() {
            bail!(
                "vb has dtype {:?}, it must be a floating-point type",
                vb.dtype()
            );
        }
        let model = vb.pp("model");
        let embedding = model
            .pp("embed_tokens")
            .get((config.vocab_size, config.hidden_size), "weight")?;
        let blocks = (0..config.num_hidden_layers)
            .map(|layer| Block::new(config, layer, model.pp("layers").pp(layer)))
            .collect::<Result<Vec<_>>>()?;
        let output = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            vb.pp("lm_head")
                .get((config.vocab_size, config.hidden_size), "weight")?
        };
        Ok(Self {
            config: config.clone(),
            blocks,
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?,
            rope: Rope::new(config, vb.dtype(), vb.device())?,
            embedding,
            output,
        })
    }

    /// The hidden states after the final norm, `[B, S, H]`.
    ///
    /// - `input_ids`: `[B, S]` of u32, below the vocabulary size. On CPU this is checked; on other devices it is not,
    ///   as that would wait for the device, and an id out of range is undefined.
    /// - `attention_mask`: `[B, past + S]`, zero at padding and one (anything but zero) at real tokens, in any dtype.
    ///   `past` is the length of the cache, 0 without one. Padding may stand on either side. The position of a token
    ///   is `max(cumsum(mask) - 1, 0)`. Hidden states at padding are finite and mean nothing.
    /// - `cache`: past keys and values, which the new ones join. With it the result is detached: for sampling only.
    ///
    /// past + S, padding included, is at most `max_position_embeddings`.
    pub fn hidden_states(
        &self,
        input_ids: &Tensor,
        attention_mask: &Tensor,
        mut cache: Option<&mut KvCache>,
    ) -> Result<Tensor> {
        let (batch, new) = self.check_input(input_ids, attention_mask, cache.as_deref())?;
        let seen = mask::to_zero_one(attention_mask)?;
        let angles = self.rope.angles(&mask::positions(&seen, new)?)?;
        let seen = seen.to_dtype(DType::U8)?;
        let pass = Pass {
            batch,
            new,
            angles: &angles,
            mask: &seen,
        };

        let mut x = embedding(&input_ids.flatten_all()?, &self.embedding)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, &pass, cache.as_deref_mut().map(|cache| (cache, layer)))?;
        }
        let x = self
            .norm
            .forward(&x)?
            .reshape((batch, new, self.config.hidden_size))?;
        // A gradient that has lost its past would be wrong, so there is none.
        Ok(if cache.is_some() { x.detach() } else { x })
    }

    /// The matrix `[V, H]` of the output layer; the embedding when tied.
    pub fn output_weight(&self) -> &Tensor {
        &self.output
    }

    /// The logits `[.., V]` of hidden states `[.., H]`, in their dtype.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let dims = hidden.dims();
        if dims.last() != Some(&self.config.hidden_size) || hidden.elem_count() == 0 {
            bail!(
                "hidden has shape {dims:?}, it must be [.., {}] and not empty",
                self.config.hidden_size
            );
        }
        if hidden.dtype() != self.output.dtype() {
            bail!(
                "hidden has dtype {:?}, it must be that of the weights, {:?}",
                hidden.dtype(),
                self.output.dtype()
            );
        }
        let rows = hidden
            .contiguous()?
            .reshape(((), self.config.hidden_size))?;
        let mut shape = dims.to_vec();
        shape[dims.len() - 1] = self.config.vocab_size;
        linear(&rows, &self.output)?.reshape(shape)
    }

    /// The shape of this decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns B and S.
    fn check_input(
        &self,
        ids: &Tensor,
        attention_mask: &Tensor,
        cache: Option<&KvCache>,
    ) -> Result<(usize, usize)> {
        let &[batch, new] = ids.dims() else {
            bail!("input_ids has shape {:?}, it must be [B, S]", ids.dims());
        };
        if batch == 0 || new == 0 {
            bail!(
                "input_ids has shape {:?}, it must have at least one row and one position",
                ids.dims()
            );
        }
        if ids.dtype() != DType::U32 {
            bail!("input_ids has dtype {:?}, it must be u32", ids.dtype());
        }
        let past = cache.map_or(0, KvCache::len);
        let total = past + new;
        if total > self.config.max_position_embeddings {
            bail!(
                "input_ids has {new} positions after {past} in the cache, together they must be at most \
                 max_position_embeddings, which is {}",
                self.config.max_position_embeddings
            );
        }
        if attention_mask.dims() != [batch, total] {
            bail!(
                "attention_mask has shape {:?}, it must be [{batch}, {total}]",
                attention_mask.dims()
            );
        }
        if let Some(cache) = cache {
            if cache.num_layers() != self.blocks.len() {
                bail!(
                    "cache is for {} layers, it must be for {}",
                    cache.num_layers(),
                    self.blocks.len()
                );
            }
            if let Some(rows) = cache.batch_size().filter(|&rows| rows != batch) {
                bail!("cache has {rows} rows, it must have {batch}, as input_ids");
            }
        }
        for (name, tensor) in [("input_ids", ids), ("attention_mask", attention_mask)] {
            if !tensor.device().same_device(self.embedding.device()) {
                bail!(
                    "{name} is on {:?}, it must be on the device of the weights, {:?}",
                    tensor.device().location(),
                    self.embedding.device().location()
                );
            }
        }
        if matches!(ids.device(), Device::Cpu) {
            let ids = ids.flatten_all()?.to_vec1::<u32>()?;
            if let Some(at) = ids
                .iter()
                .position(|&id| id as usize >= self.config.vocab_size)
            {
                bail!(
                    "input_ids[{}, {}] is {}, it must be below vocab_size, which is {}",
                    at / new,
                    at % new,
                    ids[at],
                    self.config.vocab_size
                );
            }
        }
        Ok((batch, new))
    }
}

impl Block {
    fn new(config: &DecoderConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let norm = |name| RmsNorm::new(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::new(config, layer, vb.pp("self_attn"))?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, vb.pp("mlp"))?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        pass: &Pass,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Result<Tensor> {
        let x = (x + self
            .attention
            .forward(&self.attention_norm.forward(x)?, pass, cache)?)?;
        let y = self.mlp.forward(&self.mlp_norm.forward(&x)?)?;
        x + y
    }
}
