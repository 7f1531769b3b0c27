//! Root mean square normalisation.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::rms_norm;
use candle_nn::VarBuilder;

/// RMSNorm (Zhang and Sennrich 2019).
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
        rms_norm(x, &self.weight, self.epsilon)
    }
}
