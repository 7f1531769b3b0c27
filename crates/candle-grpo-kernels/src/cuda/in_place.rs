//! In-place writes to tensors on the GPU.

use std::cell::RefCell;

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// Calls `write` with the storage of `tensor`, which must be on a GPU.
pub(crate) fn write(
    tensor: &Tensor,
    write: impl FnOnce(&mut CudaStorage, &Layout) -> Result<()>,
) -> Result<()> {
    tensor.inplace_op1(&Write(RefCell::new(Some(write))))
}

/// Holds the closure in a cell, because an in-place operation only has a shared reference to
/// itself.
struct Write<F>(RefCell<Option<F>>);

impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write_in_place"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a tensor is on the CPU, must be on a GPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        match self.0.take() {
            Some(write) => write(storage, layout),
            None => Ok(()),
        }
    }
}
