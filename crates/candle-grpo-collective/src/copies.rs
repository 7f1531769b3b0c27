//! Operations on tensors whose device or dtype the ranks do not support.

use candle_core::{DType, Device, Result, Tensor};

/// Calls `operation` with the tensors. Tensors on a device other than `device`, or with a dtype
/// other than `dtype` of theirs, are replaced by copies, and receive the results.
///
/// If there are two devices, one must be the CPU. Candle's copies from one GPU to another, or
/// between two handles for one GPU, do not wait for the kernels that write the tensor.
pub(crate) fn with_copies(
    tensors: &[&Tensor],
    device: &Device,
    dtype: impl Fn(DType) -> DType,
    operation: impl FnOnce(&[&Tensor]) -> Result<()>,
) -> Result<()> {
    let is_direct = |tensor: &Tensor| {
        tensor.device().same_device(device) && dtype(tensor.dtype()) == tensor.dtype()
    };
    if tensors.iter().all(|tensor| is_direct(tensor)) {
        return operation(tensors);
    }
    // Operations do not affect empty tensors, which Candle cannot cast on a GPU. A flat view shares
    // a contiguous tensor's storage.
    let originals: Vec<Tensor> = tensors
        .iter()
        .filter(|tensor| tensor.elem_count() > 0)
        .map(|tensor| tensor.detach().flatten_all())
        .collect::<Result<_>>()?;
    let copy = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(dtype(tensor.dtype()));
    let copies: Vec<Tensor> = originals.iter().map(copy).collect::<Result<_>>()?;
    operation(&copies.iter().collect::<Vec<_>>())?;
    for (original, copy) in originals.iter().zip(&copies) {
        if !is_direct(original) {
            let result = copy.to_dtype(original.dtype())?;
            original.slice_set(&result.to_device(original.device())?, 0, 0)?;
        }
    }
    Ok(())
}
