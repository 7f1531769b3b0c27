//! What lies behind tensors on the GPU, and kernels by name.

use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaFunc};
use candle_core::{Layout, Result, Storage, Tensor, bail};

use super::element::CudaElement;

/// The kernel `operator_pass_dtype` of a file of kernels, whose PTX is `ptx`.
pub(crate) fn kernel<T: CudaElement>(
    device: &CudaDevice,
    file: &str,
    ptx: &str,
    pass: &str,
) -> Result<CudaFunc> {
    // Modules are cached by name across crates.
    let module = format!("candle-grpo/{file}");
    device.get_or_load_custom_func(&format!("{pass}_{}", T::SUFFIX), &module, ptx)
}

/// Calls `read` with the elements of a contiguous tensor on a GPU.
pub(crate) fn read<T: CudaDType, R>(
    tensor: &Tensor,
    read: impl FnOnce(CudaView<T>) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => read(storage.as_cuda_slice::<T>()?.slice(range(layout)?)),
        _ => bail!(
            "a tensor is on {:?}, must be on a GPU",
            tensor.device().location()
        ),
    }
}

/// As [`read`], for a tensor that may be missing.
pub(crate) fn read_optional<T: CudaDType, R>(
    tensor: Option<&Tensor>,
    read_view: impl FnOnce(Option<CudaView<T>>) -> Result<R>,
) -> Result<R> {
    match tensor {
        None => read_view(None),
        Some(tensor) => read(tensor, |view| read_view(Some(view))),
    }
}

/// Where a contiguous tensor lies in its storage.
pub(crate) fn range(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!(
            "a layout of strides {:?} was not made contiguous",
            layout.stride()
        ),
    }
}

/// The size of a grid of one block for each row.
pub(crate) fn grid(rows: usize) -> Result<(u32, u32, u32)> {
    match u32::try_from(rows) {
        Ok(rows) if rows <= i32::MAX as u32 => Ok((rows, 1, 1)),
        _ => bail!("{rows} rows are more than a grid of blocks has"),
    }
}
