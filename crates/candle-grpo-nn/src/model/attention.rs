//! The attention half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{HeadNorms, HeadTransform};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::model::linear::Linear;
use crate::model::norm::RmsNorm;
use crate::model::pass::{Pass, QueryKeyValue};
use crate::optim::grad_sink::GradSink;

/// Grouped-query attention (Ainslie et al. 2023) with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    /// The number of its block.
    layer: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    head_norms: Option<QueryKeyNorms>,
    rotates: bool,
    head_dim: usize,
    scale: f64,
}

/// RMSNorms of each head of query and key, before the rotation.
#[derive(Debug, Clone)]
struct QueryKeyNorms {
    query: RmsNorm,
    key: RmsNorm,
}

/// The tensors of a forward pass that the backward pass needs.
pub(crate) struct AttentionRecord {
    /// Query and key before [`QueryKeyNorms`], if there are any.
    before_norm: Option<(Tensor, Tensor)>,
    /// The inputs of the attention operator.
    query_key_value: QueryKeyValue,
    mixed: Tensor,
    /// The log-sums of the attention operator, on CUDA.
    log_sums: Option<Tensor>,
}

impl Attention {
    pub(crate) fn new(config: &DecoderConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let (query_width, key_width) = (
            config.num_attention_heads * head_dim,
            config.num_key_value_heads * head_dim,
        );
        let input =
            |width, name| Linear::new(hidden, width, config.has_input_biases(), vb.pp(name));
        let head_norm = |name| RmsNorm::new(head_dim, config.rms_norm_eps, vb.pp(name));
        let head_norms = || {
            Ok::<_, candle_core::Error>(QueryKeyNorms {
                query: head_norm("q_norm")?,
                key: head_norm("k_norm")?,
            })
        };
        Ok(Self {
            layer,
            query: input(query_width, "q_proj")?,
            key: input(key_width, "k_proj")?,
            value: input(key_width, "v_proj")?,
            output: Linear::new(query_width, hidden, config.attention_bias, vb.pp("o_proj"))?,
            head_norms: config.has_head_norms().then(head_norms).transpose()?,
            rotates: config.rotates(layer),
            head_dim,
            scale: config.attention_scale(),
        })
    }

    /// `[N, hidden]` to `[N, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, AttentionRecord)> {
        let projected =
            Linear::forward_all([&self.query, &self.key, &self.value], x, pass.products())?;
        let before_norm = self
            .head_norms
            .is_some()
            .then(|| (projected[0].clone(), projected[1].clone()));
        let (query_key_value, mixed, log_sums) =
            pass.attend(self.layer, projected, &self.transform(pass), self.scale)?;
        let y = self.output.forward(&mixed, pass.products())?;
        let record = AttentionRecord {
            before_norm,
            query_key_value,
            mixed,
            log_sums,
        };
        Ok((y, record))
    }

    /// The norms and the rotation of the heads.
    fn transform<'a>(&'a self, pass: &'a Pass) -> HeadTransform<'a> {
        let norms = self.head_norms.as_ref().map(|norms| {
            let ((query, epsilon), (key, _)) = (norms.query.parts(), norms.key.parts());
            HeadNorms {
                weights: [query, key],
                epsilon,
            }
        });
        HeadTransform {
            norms,
            angles: self.rotates.then(|| pass.angles.tables()),
        }
    }

    /// Returns the gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        record: AttentionRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let AttentionRecord {
            before_norm,
            query_key_value,
            mixed,
            log_sums,
        } = record;
        let mixed_gradient = self.output.backward(&mixed, gradient, None, sink)?;
        let [mut query_gradient, mut key_gradient, value_gradient] =
            pass.attend_backward(&query_key_value, &mixed, log_sums.as_ref(), &mixed_gradient)?;
        drop((query_key_value, mixed, mixed_gradient));
        [query_gradient, key_gradient] = self
            .transform(pass)
            .rotate_back([&query_gradient, &key_gradient])?;
        if let (Some(norms), Some((query, key))) = (&self.head_norms, before_norm) {
            query_gradient = self.norm_backward(&norms.query, &query, &query_gradient, sink)?;
            key_gradient = self.norm_backward(&norms.key, &key, &key_gradient, sink)?;
        }
        let x_gradient = self.query.backward(x, &query_gradient, None, sink)?;
        let x_gradient = self
            .key
            .backward(x, &key_gradient, Some(x_gradient), sink)?;
        self.value
            .backward(x, &value_gradient, Some(x_gradient), sink)
    }

    /// `[N, heads * head_dim]` to `[N, heads, head_dim]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        x.reshape((x.dim(0)?, (), self.head_dim))
    }

    /// The backward pass of a norm of each head.
    fn norm_backward(
        &self,
        norm: &RmsNorm,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        norm.backward(&self.heads(x)?, &self.heads(gradient)?, sink)?
            .reshape(x.shape())
    }
}
