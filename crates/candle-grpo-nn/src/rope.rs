//! Rotary position embedding.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::rope;

use candle_grpo_kernels::arithmetic_dtype;

/// The rotary frequencies `theta^(-2i / head_dim)`, computed in f64 on the host.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    inverse_frequencies: Tensor,
}

/// Cosines and sines of one forward pass, [B * S, head_dim / 2]: every layer and head shares them.
#[derive(Debug, Clone)]
pub(crate) struct RopeAngles {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(crate) fn new(head_dim: usize, theta: f64, dtype: DType, device: &Device) -> Result<Self> {
        let pairs = head_dim / 2;
        let frequencies: Vec<f64> = (0..pairs)
            .map(|pair| theta.powf(-((2 * pair) as f64) / head_dim as f64))
            .collect();
        let inverse_frequencies = Tensor::from_vec(frequencies, (1, pairs), &Device::Cpu)?
            .to_dtype(arithmetic_dtype(dtype))?
            .to_device(device)?;
        Ok(Self {
            inverse_frequencies,
        })
    }

    /// `positions` is [B, S] in any float dtype that holds its integers exactly.
    pub(crate) fn angles(&self, positions: &Tensor) -> Result<RopeAngles> {
        let positions = positions
            .to_dtype(self.inverse_frequencies.dtype())?
            .reshape(((), 1))?;
        let angles = positions.broadcast_mul(&self.inverse_frequencies)?;
        Ok(RopeAngles {
            cos: angles.cos()?,
            sin: angles.sin()?,
        })
    }
}

impl RopeAngles {
    /// Rotates the heads of [B * S, heads * head_dim].
    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        rope(x, &self.cos, &self.sin)
    }
}
