//! A weight for repeated calls to [`packed_linear_rows`](crate::packed_linear_rows).

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::cpu::panel::Panels;
use crate::{check, path};

/// A weight `[outputs, inputs]`, dense or in blocks, with a copy in the order in which the CPU
/// multiplies it.
///
/// For few rows, [`linear_rows`](crate::linear_rows()) spends much of its time rearranging the
/// weight. [`packed_linear_rows`](crate::packed_linear_rows) avoids this, and its results have the
/// same bits.
///
/// On the CPU, dtypes in [`Self::copies`] are copied. Other weights are read in place. If you later
/// change the weight in place, the copy does not change.
///
/// Clones share the memory.
#[derive(Clone)]
pub struct PackedWeight {
    pub(crate) weight: Tensor,
    pub(crate) panels: Option<Arc<Panels>>,
}

impl PackedWeight {
    /// Copies `weight`, on all cores.
    ///
    /// # Errors
    ///
    /// Fails if `weight` is in a graph. [`packed_linear_rows`](crate::packed_linear_rows) checks
    /// its shape.
    pub fn new(weight: &Tensor) -> Result<Self> {
        check::constant("weight", weight)?;
        if !path::is_fused_on_cpu(weight) || weight.rank() != 2 {
            let weight = weight.clone();
            return Ok(Self {
                weight,
                panels: None,
            });
        }
        let weight = weight.contiguous()?;
        let panels = Panels::new(&weight)?.map(Arc::new);
        Ok(Self { weight, panels })
    }

    /// Returns whether weights with this dtype are copied on the CPU. f32 is, and bf16 if the
    /// processor has `avx512_bf16` but no AMX.
    pub fn copies(dtype: DType) -> bool {
        Panels::exist(dtype)
    }

    /// Returns whether there is a copy.
    pub fn is_packed(&self) -> bool {
        self.panels.is_some()
    }
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedWeight")
            .field("shape", self.weight.shape())
            .field("dtype", &self.weight.dtype())
            .field("is_packed", &self.is_packed())
            .finish()
    }
}
