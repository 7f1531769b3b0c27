//! Root mean square normalization.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{add_rms_norm, rms_norm, rms_norm_gradient};
use candle_nn::VarBuilder;

use crate::model::architecture::NormPlan;
use crate::model::named_weight::NamedWeight;
use crate::optim::grad_sink::GradSink;

/// RMSNorm (Zhang and Sennrich 2019): `x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: NamedWeight,
    epsilon: f64,
}

impl RmsNorm {
    /// Takes the weight from `vb`, the builder of the block.
    pub(crate) fn new(plan: &NormPlan, vb: &VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: NamedWeight::get(&vb.pp(&plan.name), plan.width, "weight")?,
            epsilon: plan.epsilon,
        })
    }

    /// `[.., width]` to the same shape and dtype.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight.tensor, self.epsilon)
    }

    /// Returns `x + change` and its norm.
    pub(crate) fn forward_sum(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        match change {
            Some(change) => add_rms_norm(x, change, &self.weight.tensor, self.epsilon),
            None => Ok((x.clone(), self.forward(x)?)),
        }
    }

    /// The weight `[width]`, and the epsilon.
    pub(crate) fn parts(&self) -> (&Tensor, f64) {
        (&self.weight.tensor, self.epsilon)
    }

    /// Returns the gradient of `x` from that of the result.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let (x_gradient, weight_gradient) =
            rms_norm_gradient(x, &self.weight.tensor, self.epsilon, gradient)?;
        sink.add(&self.weight, || Ok(weight_gradient))?;
        Ok(x_gradient)
    }

    /// [`Self::backward`] of a norm of each head, for `[N, heads * width]`.
    pub(crate) fn backward_heads(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let width = self.weight.tensor.elem_count();
        let heads = |x: &Tensor| x.reshape((x.dim(0)?, (), width));
        self.backward(&heads(x)?, &heads(gradient)?, sink)?
            .reshape(x.shape())
    }
}
