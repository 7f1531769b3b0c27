//! A weight of many calls of [`packed_linear_rows`](crate::packed_linear_rows).

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::cpu::panel::Panels;
use crate::{check, path};

/// A weight `[outputs, inputs]`, or its blocks, with a copy in the order in which the CPU
/// multiplies it.
///
/// For few rows, [`linear_rows`](crate::linear_rows()) takes much of its time to rearrange the
/// weight. [`packed_linear_rows`](crate::packed_linear_rows) does not, and its results have the
/// same bits.
///
/// There is a copy if [`Self::copies`] its dtype on the CPU. Other weights are read where they are.
/// A later change of the weight in place does not change the copy.
///
/// A clone shares the memory.
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

    /// Returns whether a weight of this dtype on the CPU has a copy. f32 has one, and bf16 if the
    /// processor has `avx512_bf16` and no AMX.
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
