//! Root mean square normalization.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{add, add_rms_norm, arithmetic_dtype, rms_norm, rms_norm_gradient};
use candle_nn::VarBuilder;

use crate::config::architecture::NormPlan;
use crate::model::named_weight::NamedWeight;
use crate::optim::grad_sink::GradSink;

/// RMSNorm (Zhang and Sennrich 2019): `x / sqrt(mean(x^2) + epsilon) * factor`.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: NamedWeight,
    epsilon: f64,
    /// The factor is `1 + weight` instead of the weight.
    is_offset: bool,
}

impl RmsNorm {
    /// Reads the weight from `vb`, the block's builder.
    pub(crate) fn new(plan: &NormPlan, vb: &VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: NamedWeight::get(&vb.pp(&plan.name), plan.width, "weight")?,
            epsilon: plan.epsilon,
            is_offset: plan.is_offset,
        })
    }

    /// Normalizes `[.., width]`, keeping shape and dtype.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (wide, factor) = self.operands(x)?;
        rms_norm(&wide, &factor, self.epsilon)?.to_dtype(x.dtype())
    }

    /// Returns `x + change` and its norm.
    pub(crate) fn forward_sum(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        match change {
            Some(change) if !self.is_offset => {
                add_rms_norm(x, change, &self.weight.tensor, self.epsilon)
            }
            Some(change) => {
                let sum = add(x, change)?;
                let y = self.forward(&sum)?;
                Ok((sum, y))
            }
            None => Ok((x.clone(), self.forward(x)?)),
        }
    }

    /// Like [`Self::forward`], on each head in `[N, heads * width]`.
    pub(crate) fn forward_heads(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(&self.heads(x)?)?.reshape(x.shape())
    }

    /// The weight `[width]` and the epsilon, if the weight is the factor.
    pub(crate) fn weight(&self) -> Option<(&Tensor, f64)> {
        (!self.is_offset).then_some((&self.weight.tensor, self.epsilon))
    }

    /// Returns the gradient with respect to `x`, given the output gradient.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let (wide, factor) = self.operands(x)?;
        let gradient = gradient.to_dtype(wide.dtype())?;
        let (x_gradient, weight_gradient) =
            rms_norm_gradient(&wide, &factor, self.epsilon, &gradient)?;
        sink.add(&self.weight, || Ok(weight_gradient))?;
        x_gradient.to_dtype(x.dtype())
    }

    /// Returns `x` and the factor. In bf16 and f16, `1 + weight` would lose bits, so both are f32.
    fn operands(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let weight = &self.weight.tensor;
        if !self.is_offset {
            return Ok((x.clone(), weight.clone()));
        }
        let wide = arithmetic_dtype(x.dtype());
        Ok((x.to_dtype(wide)?, (weight.to_dtype(wide)? + 1.0)?))
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
