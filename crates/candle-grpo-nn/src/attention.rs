//! The attention half of a block.

use candle_core::{D, Result, Tensor};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::kv_cache::KvCache;
use crate::linear::Linear;
use crate::rope::RopeAngles;

/// Grouped-query attention (Ainslie et al. 2023) with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// What every block of one forward pass shares.
pub(crate) struct Pass<'a> {
    /// Number of rows (B).
    pub(crate) batch: usize,
    /// Number of new positions (S).
    pub(crate) new: usize,
    pub(crate) angles: &'a RopeAngles,
    /// [B, 1, S, past + S], in the dtype of the softmax.
    pub(crate) bias: &'a Tensor,
}

impl Attention {
    pub(crate) fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let hidden = config.hidden_size;
        let (heads, kv_heads, head_dim) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim(),
        );
        Ok(Self {
            query: Linear::new(hidden, heads * head_dim, vb.pp("q_proj"))?,
            key: Linear::new(hidden, kv_heads * head_dim, vb.pp("k_proj"))?,
            value: Linear::new(hidden, kv_heads * head_dim, vb.pp("v_proj"))?,
            output: Linear::new(heads * head_dim, hidden, vb.pp("o_proj"))?,
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// [B * S, hidden] to [B * S, hidden]; `cache` is the cache and the number of this block in it.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        pass: &Pass,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Result<Tensor> {
        let (batch, new) = (pass.batch, pass.new);
        let split = |y: Tensor, heads: usize| {
            y.reshape((batch, new, heads, self.head_dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        // Scaled before the product: there are fewer queries than scores.
        let query = (self.query.forward(x)? * (self.head_dim as f64).powf(-0.5))?;
        let query = split(pass.angles.rotate(&query)?, self.heads)?;
        let key = split(pass.angles.rotate(&self.key.forward(x)?)?, self.kv_heads)?;
        let value = split(self.value.forward(x)?, self.kv_heads)?;
        let (key, value) = match cache {
            None => (key, value),
            Some((cache, layer)) => cache.append(layer, &key, &value)?,
        };
        let total = key.dim(2)?;

        // The query heads of one key head lie side by side, so they are one taller matrix and no key is repeated.
        let grouped = (batch, self.kv_heads, self.heads / self.kv_heads * new, ());
        let scores = query.reshape(grouped)?.matmul(&key.t()?)?;
        let scores = scores
            .reshape((batch, self.heads, new, total))?
            .to_dtype(pass.bias.dtype())?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(pass.bias)?, D::Minus1)?;
        let mixed = weights
            .to_dtype(value.dtype())?
            .reshape(grouped)?
            .matmul(&value)?;

        let mixed = mixed
            .reshape((batch, self.heads, new, self.head_dim))?
            .transpose(1, 2)?
            .contiguous()?;
        self.output
            .forward(&mixed.reshape((batch * new, self.heads * self.head_dim))?)
    }
}
