//! The feed-forward half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{swiglu, swiglu_gradient};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::model::linear::{Linear, Products};
use crate::optim::grad_sink::GradSink;

/// SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The tensors of a forward pass that the backward pass needs.
pub(crate) struct MlpRecord {
    gate: Tensor,
    up: Tensor,
    inner: Tensor,
}

impl Mlp {
    pub(crate) fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let (hidden, inner, bias) = (
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
        );
        Ok(Self {
            gate: Linear::new(hidden, inner, bias, vb.pp("gate_proj"))?,
            up: Linear::new(hidden, inner, bias, vb.pp("up_proj"))?,
            down: Linear::new(inner, hidden, bias, vb.pp("down_proj"))?,
        })
    }

    /// `[N, hidden]` to `[N, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, products: Products) -> Result<(Tensor, MlpRecord)> {
        let [gate, up] = Linear::forward_all([&self.gate, &self.up], x, products)?;
        let inner = swiglu(&gate, &up)?;
        let y = self.down.forward(&inner, products)?;
        Ok((y, MlpRecord { gate, up, inner }))
    }

    /// Returns the gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        record: MlpRecord,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let inner_gradient = self.down.backward(&record.inner, gradient, None, sink)?;
        let (gate_gradient, up_gradient) =
            swiglu_gradient(&record.gate, &record.up, &inner_gradient)?;
        drop((record, inner_gradient));
        let x_gradient = self.gate.backward(x, &gate_gradient, None, sink)?;
        self.up.backward(x, &up_gradient, Some(x_gradient), sink)
    }
}
