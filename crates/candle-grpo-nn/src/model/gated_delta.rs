//! The gated delta rule, a token mixer.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{DeltaHeads, delta_gates, delta_gates_gradient, swiglu, swiglu_gradient};
use candle_nn::VarBuilder;

use crate::config::architecture::GatedDeltaPlan;
use crate::model::block::Mixer;
use crate::model::linear::{Linear, Maps};
use crate::model::named_weight::NamedWeight;
use crate::model::norm::RmsNorm;
use crate::model::pass::Pass;
use crate::optim::grad_sink::GradSink;

/// Gated DeltaNet (<https://arxiv.org/abs/2412.06464>) as in Qwen3.5: linear maps, a convolution
/// over queries, keys and values, the gated delta rule, and a gated norm on each head.
#[derive(Debug, Clone)]
pub(crate) struct GatedDelta {
    /// Block number.
    layer: usize,
    heads: DeltaHeads,
    /// Fused query, key and value; the output gate; and the gate inputs `b` and `a`.
    inputs: Maps<4>,
    output: Linear,
    /// `[width, 1, taps]`
    conv: NamedWeight,
    a_log: NamedWeight,
    dt_bias: NamedWeight,
    norm: RmsNorm,
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct GatedDeltaRecord {
    /// Outputs of the linear maps.
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    /// Inputs to the rule.
    inputs: [Tensor; 3],
    /// Output of the rule.
    o: Tensor,
    /// Input to the last linear map.
    gated: Tensor,
}

impl GatedDelta {
    pub(crate) fn new(plan: &GatedDeltaPlan, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let heads = plan.heads;
        let vector = |name| NamedWeight::get(&vb.pp("linear_attn"), heads.value_heads, name);
        Ok(Self {
            layer,
            heads,
            inputs: Maps::new(&plan.inputs, vb)?,
            output: Linear::new(&plan.output, vb)?,
            conv: NamedWeight::get(
                &vb.pp("linear_attn.conv1d"),
                (heads.width(), 1, plan.taps),
                "weight",
            )?,
            a_log: vector("A_log")?,
            dt_bias: vector("dt_bias")?,
            norm: RmsNorm::new(&plan.norm, vb)?,
        })
    }

    fn conv_weight(&self) -> Result<Tensor> {
        self.conv.tensor.squeeze(1)
    }
}

impl Mixer for GatedDelta {
    type Record = GatedDeltaRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        let inputs = self.inputs.linear().iter_mut();
        inputs.chain([&mut self.output]).collect()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, GatedDeltaRecord)> {
        let x = pass.without_padding(x)?;
        let [qkv, z, b, a] = self.inputs.forward(&x, pass)?;
        let (g, beta) = delta_gates(&a, &b, &self.a_log.tensor, &self.dt_bias.tensor)?;
        let weight = self.conv_weight()?;
        let (convolved, o) = pass.delta_rule(self.layer, [&qkv, &weight, &g, &beta], self.heads)?;
        let mut gated = swiglu(&z, &self.norm.forward_heads(&o)?)?;
        if !pass.products().have_gradients() {
            gated = gated.detach();
        }
        let y = self.output.forward(&gated, pass)?;
        let record = GatedDeltaRecord {
            qkv,
            z,
            b,
            a,
            inputs: [convolved, g, beta],
            o,
            gated,
        };
        Ok((y, record))
    }

    fn backward(
        &self,
        x: &Tensor,
        record: GatedDeltaRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let GatedDeltaRecord {
            qkv,
            z,
            b,
            a,
            inputs,
            o,
            gated,
        } = record;
        let gradient = self
            .output
            .backward(&gated, gradient, None, (pass, &mut *sink))?;
        drop(gated);
        let normalized = self.norm.forward_heads(&o)?;
        let (of_z, of_normalized) = swiglu_gradient(&z, &normalized, &gradient)?;
        drop((z, normalized));
        let of_o = self.norm.backward_heads(&o, &of_normalized, sink)?;
        drop((o, of_normalized));
        let weight = self.conv_weight()?;
        let [of_qkv, of_weight, of_g, of_beta] =
            pass.delta_rule_backward([&qkv, &weight], inputs.each_ref(), self.heads, &of_o)?;
        drop((qkv, inputs, of_o));
        sink.add(&self.conv, || of_weight.unsqueeze(1))?;
        let [of_a, of_b, of_a_log, of_dt_bias] = delta_gates_gradient(
            [&a, &b, &self.a_log.tensor, &self.dt_bias.tensor],
            [&of_g, &of_beta],
        )?;
        sink.add(&self.a_log, || Ok(of_a_log))?;
        sink.add(&self.dt_bias, || Ok(of_dt_bias))?;
        self.inputs
            .backward(x, &[of_qkv, of_z, of_b, of_a], (pass, sink))
    }
}
