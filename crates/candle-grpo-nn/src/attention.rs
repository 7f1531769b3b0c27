//! The attention half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::attention;
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::kv_cache::KvCache;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rope::RopeAngles;

/// Grouped-query attention (Ainslie et al. 2023) with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    /// Of query and key.
    pub(crate) head_norms: Option<(RmsNorm, RmsNorm)>,
    pub(crate) rotates: bool,
    pub(crate) head_dim: usize,
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
    pub(crate) fn new(config: &DecoderConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let hidden = config.hidden_size;
        let (heads, kv_heads, head_dim) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim(),
        );
        let projection = |heads: usize, name| {
            let (outputs, vb) = (heads * head_dim, vb.pp(name));
            match config.has_projection_biases() {
                true => Linear::with_bias(hidden, outputs, vb),
                false => Linear::new(hidden, outputs, vb),
            }
        };
        let head_norm = |name| RmsNorm::new(head_dim, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            query: projection(heads, "q_proj")?,
            key: projection(kv_heads, "k_proj")?,
            value: projection(kv_heads, "v_proj")?,
            output: Linear::new(heads * head_dim, hidden, vb.pp("o_proj"))?,
            head_norms: match config.has_head_norms() {
                true => Some((head_norm("q_norm")?, head_norm("k_norm")?)),
                false => None,
            },
            rotates: config.rotates(layer),
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
        let (mut query, mut key) = (self.query.forward(x)?, self.key.forward(x)?);
        if let Some((of_query, of_key)) = &self.head_norms {
            query = self.normalise_heads(of_query, &query)?;
            key = self.normalise_heads(of_key, &key)?;
        }
        if self.rotates {
            query = pass.angles.rotate(&query)?;
            key = pass.angles.rotate(&key)?;
        }
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

    /// [N, heads * head_dim] to the same shape, each head by itself.
    pub(crate) fn normalise_heads(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        let heads = x.reshape((x.dim(0)?, (), self.head_dim))?;
        norm.forward(&heads)?.reshape(x.shape())
    }
}
