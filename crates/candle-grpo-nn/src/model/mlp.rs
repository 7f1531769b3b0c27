//! The feed-forward layer, a channel mixer.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::config::architecture::{Gate, MlpPlan};
use crate::model::block::Mixer;
use crate::model::linear::{Linear, Maps};
use crate::model::pass::Pass;
use crate::optim::grad_sink::GradSink;

/// A gated layer (Shazeer 2020): `down(activation(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    /// Gate and up maps.
    inputs: Maps<2>,
    gate: Gate,
    down: Linear,
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct MlpRecord {
    gate: Tensor,
    up: Tensor,
    inner: Tensor,
}

impl Mlp {
    pub(crate) fn new(plan: &MlpPlan, vb: &VarBuilder) -> Result<Self> {
        Ok(Self {
            inputs: Maps::new(&plan.inputs, vb)?,
            gate: plan.gate,
            down: Linear::new(&plan.down, vb)?,
        })
    }

    /// The gate, up and down weights, if the layer is SwiGLU with three
    /// [plain](Linear::plain_weight) maps.
    pub(crate) fn plain_weights(&self) -> Option<[Tensor; 3]> {
        let Maps::Apart([gate, up]) = &self.inputs else {
            return None;
        };
        if !self.gate.is_swiglu {
            return None;
        }
        Some([
            gate.plain_weight()?,
            up.plain_weight()?,
            self.down.plain_weight()?,
        ])
    }
}

impl Mixer for Mlp {
    type Record = MlpRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        let inputs = self.inputs.linear().iter_mut();
        inputs.chain([&mut self.down]).collect()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, MlpRecord)> {
        let [gate, up] = self.inputs.forward(x, pass)?;
        let inner = (self.gate.forward)(&gate, &up)?;
        let y = self.down.forward(&inner, pass)?;
        Ok((y, MlpRecord { gate, up, inner }))
    }

    fn backward(
        &self,
        x: &Tensor,
        record: MlpRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let inner_gradient =
            self.down
                .backward(&record.inner, gradient, None, (pass, &mut *sink))?;
        let (gate_gradient, up_gradient) =
            (self.gate.backward)(&record.gate, &record.up, &inner_gradient)?;
        drop((record, inner_gradient));
        self.inputs
            .backward(x, &[gate_gradient, up_gradient], (pass, sink))
    }
}
