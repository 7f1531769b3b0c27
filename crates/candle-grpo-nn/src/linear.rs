//! A linear map without bias.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

/// `y = x w^T` for flat rows. Rows are flat because a matmul with a batch dimension would broadcast the weight, and
/// its gradient, once per batch row.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Tensor,
}

impl Linear {
    pub(crate) fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get((outputs, inputs), "weight")?,
        })
    }

    /// [N, inputs] to [N, outputs].
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)
    }
}
