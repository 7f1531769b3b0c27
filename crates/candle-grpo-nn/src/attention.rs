//! The attention half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::attention;
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
    head_dim: usize,
}

/// What every block of one forward pass shares.
pub(crate) struct Pass<'a> {
    /// Number of rows (B).
    pub(crate) batch: usize,
    /// Number of new positions (S).
    pub(crate) new: usize,
    pub(crate) angles: &'a RopeAngles,
    /// [B, past + S] of u8.
    pub(crate) mask: &'a Tensor,
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
        let query = pass.angles.rotate(&self.query.forward(x)?)?;
        let key = pass.angles.rotate(&self.key.forward(x)?)?;
        let value = self.value.forward(x)?;
        let (key, value) = match cache {
            None => (key, value),
            Some((cache, layer)) => {
                let by_sequence = |x: &Tensor| x.reshape((pass.batch, pass.new, ()));
                cache.append(layer, &by_sequence(&key)?, &by_sequence(&value)?)?
            }
        };
        let scale = (self.head_dim as f64).powf(-0.5);
        let mixed = attention(&query, &key, &value, pass.mask, self.head_dim, scale)?;
        self.output.forward(&mixed)
    }
}
