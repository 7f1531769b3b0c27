//! Root mean square normalisation.

use candle_core::{D, Result, Tensor};
use candle_nn::VarBuilder;

use crate::precision::arithmetic_dtype;

/// RMSNorm (Zhang and Sennrich 2019), composed: Candle's fused one has no backward pass.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    epsilon: f64,
}

impl RmsNorm {
    pub(crate) fn new(width: usize, epsilon: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get(width, "weight")?,
            epsilon,
        })
    }

    /// [.., width] to the same shape and dtype.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(arithmetic_dtype(x.dtype()))?;
        let mean_square = (wide.sqr()?.sum_keepdim(D::Minus1)? / wide.dim(D::Minus1)? as f64)?;
        let scale = (mean_square + self.epsilon)?.sqrt()?.recip()?;
        wide.broadcast_mul(&scale)?
            .to_dtype(x.dtype())?
            .broadcast_mul(&self.weight)
    }
}
