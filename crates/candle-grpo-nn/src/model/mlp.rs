//! The feed-forward half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{swiglu, swiglu_gradient};
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::model::linear::Linear;
use crate::optim::grad_sink::GradientSink;

/// SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Mlp {
    pub(crate) fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate: Linear::new(hidden, inner, vb.pp("gate_proj"))?,
            up: Linear::new(hidden, inner, vb.pp("up_proj"))?,
            down: Linear::new(inner, hidden, vb.pp("down_proj"))?,
        })
    }

    /// [N, hidden] to [N, hidden].
    pub(crate) fn forward(&self, x: &Tensor) -> Result<(Tensor, MlpRecord)> {
        let (gate, up) = (self.gate.forward(x)?, self.up.forward(x)?);
        let inner = swiglu(&gate, &up)?;
        let y = self.down.forward(&inner)?;
        Ok((y, MlpRecord { gate, up, inner }))
    }

    /// The gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        record: MlpRecord,
        gradient: &Tensor,
        sink: &mut GradientSink,
    ) -> Result<Tensor> {
        let of_inner = self.down.backward(&record.inner, gradient, None, sink)?;
        let (of_gate, of_up) = swiglu_gradient(&record.gate, &record.up, &of_inner)?;
        drop((record, of_inner));
        let of_x = self.gate.backward(x, &of_gate, None, sink)?;
        self.up.backward(x, &of_up, Some(of_x), sink)
    }
}

/// What the backward pass needs of a forward pass.
pub(crate) struct MlpRecord {
    gate: Tensor,
    up: Tensor,
    inner: Tensor,
}
