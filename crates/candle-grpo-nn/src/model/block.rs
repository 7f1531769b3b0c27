//! One block of a decoder.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::model::architecture::{BlockPlan, SublayerPlan};
use crate::model::attention::Attention;
use crate::model::mlp::Mlp;
use crate::model::norm::RmsNorm;
use crate::model::pass::Pass;
use crate::optim::grad_sink::GradSink;

/// A part of a block that maps hidden states `[N, hidden]` to a change of them.
pub(crate) trait Mixer {
    /// The tensors of a forward pass that the backward pass needs.
    type Record;

    /// `[N, hidden]` to `[N, hidden]`.
    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Record)>;

    /// Returns the gradient of `x` from that of the result.
    fn backward(
        &self,
        x: &Tensor,
        record: Self::Record,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor>;
}

/// A token mixer, then a channel mixer.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    attention: Sublayer<Attention>,
    mlp: Sublayer<Mlp>,
}

/// The tensors of a forward pass that the backward pass needs.
pub(crate) struct BlockRecord {
    attention: SublayerRecord<Attention>,
    mlp: SublayerRecord<Mlp>,
}

/// `x + mixer(norm(x))`.
#[derive(Debug, Clone)]
struct Sublayer<M> {
    before: RmsNorm,
    mixer: M,
}

struct SublayerRecord<M: Mixer> {
    x: Tensor,
    /// The input of the mixer.
    input: Tensor,
    mixer: M::Record,
}

impl Block {
    pub(crate) fn new(plan: &BlockPlan, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let attention = |plan: &_| Attention::new(plan, layer, vb);
        Ok(Self {
            attention: Sublayer::new(&plan.attention, vb, attention)?,
            mlp: Sublayer::new(&plan.mlp, vb, |plan| Mlp::new(plan, vb))?,
        })
    }

    /// `x`, `[N, hidden]`, to two tensors whose sum is the result. With `change`, the input is
    /// `x + change`: each sum and its norm are one operation.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<([Tensor; 2], BlockRecord)> {
        let (y, attention) = self.attention.forward(x, change, pass)?;
        let (y, mlp) = self.mlp.forward(&attention.x, Some(&y), pass)?;
        Ok(([mlp.x.clone(), y], BlockRecord { attention, mlp }))
    }

    /// Returns the gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        record: BlockRecord,
        pass: &Pass,
        gradient: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let gradient = self.mlp.backward(record.mlp, pass, gradient, sink)?;
        self.attention
            .backward(record.attention, pass, gradient, sink)
    }
}

impl BlockRecord {
    /// The input.
    pub(crate) fn into_input(self) -> Tensor {
        self.attention.x
    }
}

impl<M: Mixer> Sublayer<M> {
    fn new<P>(
        plan: &SublayerPlan<P>,
        vb: &VarBuilder,
        mixer: impl FnOnce(&P) -> Result<M>,
    ) -> Result<Self> {
        Ok(Self {
            before: RmsNorm::new(&plan.before, vb)?,
            mixer: mixer(&plan.mixer)?,
        })
    }

    /// Returns the change of the input `x + change`. The record has the input.
    fn forward(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<(Tensor, SublayerRecord<M>)> {
        let (x, input) = self.before.forward_sum(x, change)?;
        let (y, mixer) = self.mixer.forward(&input, pass)?;
        Ok((y, SublayerRecord { x, input, mixer }))
    }

    /// Returns the gradient of the input from that of the sum of input and change.
    fn backward(
        &self,
        record: SublayerRecord<M>,
        pass: &Pass,
        gradient: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let SublayerRecord { x, input, mixer } = record;
        let through = self.mixer.backward(&input, mixer, pass, &gradient, sink)?;
        gradient + self.before.backward(&x, &through, sink)?
    }
}
