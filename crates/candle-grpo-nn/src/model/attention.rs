//! The attention half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{Sequences, attention, attention_gradient};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::decoding::KvCache;
use crate::model::linear::Linear;
use crate::model::norm::RmsNorm;
use crate::model::rope::RopeAngles;
use crate::optim::grad_sink::GradientSink;
use crate::packing::shared_rows::SharedRows;

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
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) angles: &'a RopeAngles,
    pub(crate) sequences: Sequences<'a>,
    /// Rows that sequences share, if they do.
    pub(crate) shared: Option<&'a SharedRows>,
}

/// What the backward pass needs of a forward pass.
pub(crate) struct AttentionRecord {
    /// Query and key before their heads were normalised, if they were.
    before_norm: Option<(Tensor, Tensor)>,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
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

    /// [N, hidden] to [N, hidden]; `cache` is the cache, the number of this block in it and the number of sequences.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        pass: &Pass,
        cache: Option<(&mut KvCache, usize, usize)>,
    ) -> Result<(Tensor, AttentionRecord)> {
        let (mut query, mut key) = (self.query.forward(x)?, self.key.forward(x)?);
        let mut before_norm = None;
        if let Some((of_query, of_key)) = &self.head_norms {
            let normed = self.normalise_heads(of_query, &query)?;
            let normed_key = self.normalise_heads(of_key, &key)?;
            before_norm = Some((query, key));
            (query, key) = (normed, normed_key);
        }
        if self.rotates {
            query = pass.angles.rotate(&query)?;
            key = pass.angles.rotate(&key)?;
        }
        let value = self.value.forward(x)?;
        let (key, value) = match cache {
            None => (key, value),
            Some((cache, layer, batch)) => {
                let by_sequence = |x: &Tensor| x.reshape((batch, (), x.dim(1)?));
                cache.append(layer, &by_sequence(&key)?, &by_sequence(&value)?)?
            }
        };
        let mixed = self.mix([&query, &key, &value], pass)?;
        let y = self.output.forward(&mixed)?;
        let record = AttentionRecord {
            before_norm,
            query,
            key,
            value,
            mixed,
        };
        Ok((y, record))
    }

    /// The gradient of `x` from that of the result; for a pass without a cache.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        record: AttentionRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradientSink,
    ) -> Result<Tensor> {
        let of_mixed = self.output.backward(&record.mixed, gradient, None, sink)?;
        let AttentionRecord {
            before_norm,
            query,
            key,
            value,
            mixed,
        } = record;
        drop(mixed);
        let [mut of_query, mut of_key, of_value] =
            self.mix_backward([&query, &key, &value], pass, &of_mixed)?;
        drop((query, key, value, of_mixed));
        if self.rotates {
            of_query = pass.angles.rotate_back(&of_query)?;
            of_key = pass.angles.rotate_back(&of_key)?;
        }
        if let (Some((query_norm, key_norm)), Some((query, key))) = (&self.head_norms, before_norm)
        {
            of_query = self.heads_backward(query_norm, &query, &of_query, sink)?;
            of_key = self.heads_backward(key_norm, &key, &of_key, sink)?;
        }
        let of_x = self.query.backward(x, &of_query, None, sink)?;
        let of_x = self.key.backward(x, &of_key, Some(of_x), sink)?;
        self.value.backward(x, &of_value, Some(of_x), sink)
    }

    /// What each token takes of the values before it.
    fn mix(&self, x: [&Tensor; 3], pass: &Pass) -> Result<Tensor> {
        let mix = |[query, key, value]: [&Tensor; 3]| {
            let (head_dim, scale) = (self.head_dim, self.scale());
            attention(query, key, value, pass.sequences, head_dim, scale)
        };
        match pass.shared {
            None => mix(x),
            Some(shared) => shared.to_rows(&mix(shared.to_tokens(x)?.each_ref())?),
        }
    }

    /// The gradients of the arguments of [`Self::mix`] from that of its result.
    fn mix_backward(&self, x: [&Tensor; 3], pass: &Pass, gradient: &Tensor) -> Result<[Tensor; 3]> {
        let backward = |[query, key, value]: [&Tensor; 3], gradient: &Tensor| {
            let (head_dim, scale) = (self.head_dim, self.scale());
            let sequences = pass.sequences;
            attention_gradient(query, key, value, sequences, head_dim, scale, gradient)
        };
        let Some(shared) = pass.shared else {
            return backward(x, gradient);
        };
        let gradient = shared.to_rows_gradient(gradient)?;
        let x = shared.to_tokens(x)?;
        shared.to_tokens_gradient(backward(x.each_ref(), &gradient)?)
    }

    fn scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// [N, heads * head_dim] to the same shape, each head by itself.
    pub(crate) fn normalise_heads(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        let heads = x.reshape((x.dim(0)?, (), self.head_dim))?;
        norm.forward(&heads)?.reshape(x.shape())
    }

    /// The backward pass of [`Self::normalise_heads`].
    fn heads_backward(
        &self,
        norm: &RmsNorm,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradientSink,
    ) -> Result<Tensor> {
        let heads = |x: &Tensor| x.reshape((x.dim(0)?, (), self.head_dim));
        norm.backward(&heads(x)?, &heads(gradient)?, sink)?
            .reshape(x.shape())
    }
}
