//! Rotary position embedding.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{arithmetic_dtype, rope_angles};

use crate::config::architecture::Rotation;

/// Rotary frequencies, computed on the host.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    inverse_frequencies: Tensor,
    /// Multiplies cosines and sines.
    attention_factor: f64,
}

/// Cosines and sines for one forward pass, `[N, head_dim / 2]`, shared by all heads.
#[derive(Debug, Clone)]
pub(crate) struct RopeAngles {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(crate) fn new(rotation: &Rotation, dtype: DType, device: &Device) -> Result<Self> {
        let scaling = &rotation.scaling;
        let frequencies = scaling.frequencies(rotation.width, rotation.theta);
        let pairs = frequencies.len();
        let inverse_frequencies = Tensor::from_vec(frequencies, (1, pairs), &Device::Cpu)?
            .to_dtype(arithmetic_dtype(dtype))?
            .to_device(device)?;
        Ok(Self {
            inverse_frequencies,
            attention_factor: scaling.attention_factor(),
        })
    }

    /// Computes the angles at N positions, in any shape and any dtype that represents them exactly.
    pub(crate) fn angles(&self, positions: &Tensor) -> Result<RopeAngles> {
        let (cos, sin) = rope_angles(positions, &self.inverse_frequencies, self.attention_factor)?;
        Ok(RopeAngles { cos, sin })
    }
}

impl RopeAngles {
    /// Cosines and sines.
    pub(crate) fn tables(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }
}
