//! Decoder weights in the order in which the CPU multiplies them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Tensor, TensorId};
use candle_grpo_kernels::{PackedWeight, packed_linear_rows};

/// Weight copies. Each is made on first use.
#[derive(Debug, Default)]
pub(crate) struct PackedWeights(Mutex<HashMap<TensorId, PackedWeight>>);

impl PackedWeights {
    /// `x w^T` for each of `weights`, which do not change after the first call.
    pub(crate) fn linear_rows(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
        let packed = weights.iter().map(|weight| self.get(weight));
        let packed = packed.collect::<Result<Vec<_>>>()?;
        packed_linear_rows(x, &packed.iter().collect::<Vec<_>>())
    }

    fn get(&self, weight: &Tensor) -> Result<PackedWeight> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(packed) = all.get(&weight.id()) {
            return Ok(packed.clone());
        }
        let packed = PackedWeight::new(&weight.detach())?;
        all.insert(weight.id(), packed.clone());
        Ok(packed)
    }
}
