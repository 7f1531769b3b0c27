//! Root mean square normalization.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{RmsNormOptions, add_rms_norm, rms_norm, rms_norm_gradient};
use candle_nn::VarBuilder;

use crate::config::architecture::NormPlan;
use crate::model::named_weight::NamedWeight;
use crate::optim::grad_sink::GradSink;

/// RMSNorm (Zhang and Sennrich 2019): `x / sqrt(mean(x^2) + epsilon) * factor`.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: NamedWeight,
    options: RmsNormOptions,
}

impl RmsNorm {
    /// Reads the weight from `vb`, the block's builder.
    pub(crate) fn new(plan: &NormPlan, vb: &VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: NamedWeight::get(&vb.pp(&plan.name), plan.width, "weight")?,
            options: RmsNormOptions {
                epsilon: plan.epsilon,
                is_offset: plan.is_offset,
            },
        })
    }

    /// Normalizes `[.., width]`, keeping shape and dtype.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight.tensor, self.options)
    }

    /// Returns `x + change` and its norm.
    pub(crate) fn forward_sum(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        match change {
            Some(change) => add_rms_norm(x, change, &self.weight.tensor, self.options),
            None => Ok((x.clone(), self.forward(x)?)),
        }
    }

    /// Like [`Self::forward`], on each head in `[N, heads * width]`.
    pub(crate) fn forward_heads(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(&self.heads(x)?)?.reshape(x.shape())
    }

    /// The weight `[width]` and the options, for an operator that includes the norm.
    pub(crate) fn operands(&self) -> (&Tensor, RmsNormOptions) {
        (&self.weight.tensor, self.options)
    }

    /// Returns the gradient with respect to `x`, given the output gradient.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let (x_gradient, weight_gradient) =
            rms_norm_gradient(x, &self.weight.tensor, self.options, gradient)?;
        self.add_gradient(weight_gradient, sink)?;
        Ok(x_gradient)
    }

    /// Adds a gradient of the weight, from an operator that includes the norm.
    pub(crate) fn add_gradient(&self, gradient: Tensor, sink: &mut GradSink) -> Result<()> {
        sink.add(&self.weight, || Ok(gradient))
    }

    /// Reshapes `[N, heads * width]` to `[N, heads, width]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        x.reshape((x.dim(0)?, (), self.weight.tensor.elem_count()))
    }

    /// Like [`Self::backward`], for a norm on each head in `[N, heads * width]`.
    pub(crate) fn backward_heads(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        self.backward(&self.heads(x)?, &self.heads(gradient)?, sink)?
            .reshape(x.shape())
    }
}
