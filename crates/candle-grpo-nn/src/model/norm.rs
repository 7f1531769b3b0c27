//! Root mean square normalization.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{add_rms_norm, rms_norm, rms_norm_gradient};
use candle_nn::VarBuilder;

use crate::model::named_weight::NamedWeight;
use crate::optim::grad_sink::GradSink;

/// RMSNorm (Zhang and Sennrich 2019): `x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: NamedWeight,
    epsilon: f64,
}

impl RmsNorm {
    pub(crate) fn new(width: usize, epsilon: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: NamedWeight::get(&vb, width, "weight")?,
            epsilon,
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
}
