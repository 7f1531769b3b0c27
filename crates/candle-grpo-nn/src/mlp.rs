//! The feed-forward half of a block.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::swiglu;
use candle_nn::VarBuilder;

use crate::DecoderConfig;
use crate::linear::Linear;

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
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = swiglu(&self.gate.forward(x)?, &self.up.forward(x)?)?;
        self.down.forward(&inner)
    }
}
