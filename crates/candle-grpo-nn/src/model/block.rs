//! One block of a decoder.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::model::attention::{Attention, AttentionRecord};
use crate::model::mlp::{Mlp, MlpRecord};
use crate::model::norm::RmsNorm;
use crate::model::pass::Pass;
use crate::optim::grad_sink::GradSink;

/// `m = x + attention(norm(x))`, `y = m + mlp(norm(m))`.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

/// The tensors of a forward pass that the backward pass needs.
pub(crate) struct BlockRecord {
    /// The input.
    pub(crate) x: Tensor,
    attention_input: Tensor,
    attention: AttentionRecord,
    middle: Tensor,
    mlp_input: Tensor,
    mlp: MlpRecord,
}

impl Block {
    pub(crate) fn new(config: &DecoderConfig, layer: usize, vb: VarBuilder) -> Result<Self> {
        let norm = |name| RmsNorm::new(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::new(config, layer, vb.pp("self_attn"))?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, vb.pp("mlp"))?,
        })
    }

    /// `x`, `[N, hidden]`, to `m` and `mlp(norm(m))`, whose sum is the result. With `change`, the
    /// input is `x + change`: each sum and its norm are one operation.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<([Tensor; 2], BlockRecord)> {
        let (x, attention_input) = self.attention_norm.forward_sum(x, change)?;
        let (mixed, attention) = self.attention.forward(&attention_input, pass)?;
        let (middle, mlp_input) = self.mlp_norm.forward_sum(&x, Some(&mixed))?;
        let (y, mlp) = self.mlp.forward(&mlp_input, pass.products())?;
        let record = BlockRecord {
            x,
            attention_input,
            attention,
            middle: middle.clone(),
            mlp_input,
            mlp,
        };
        Ok(([middle, y], record))
    }

    /// Returns the gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        record: BlockRecord,
        pass: &Pass,
        gradient: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let input_gradient = self
            .mlp
            .backward(&record.mlp_input, record.mlp, &gradient, sink)?;
        let middle_gradient = self
            .mlp_norm
            .backward(&record.middle, &input_gradient, sink)?;
        let gradient = (gradient + middle_gradient)?;
        let input_gradient = self.attention.backward(
            &record.attention_input,
            record.attention,
            pass,
            &gradient,
            sink,
        )?;
        gradient
            + self
                .attention_norm
                .backward(&record.x, &input_gradient, sink)?
    }
}
