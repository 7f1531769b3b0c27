//! Checks of the tensors of an operation, before a rank communicates.

use candle_core::{DType, Result, Tensor, bail};

/// Checks that the elements of each tensor are one after another.
pub(crate) fn contiguous(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    for (index, tensor) in tensors.iter().enumerate() {
        if !tensor.is_contiguous() {
            bail!(
                "{operation}: tensor {index} has the shape {:?} and the strides {:?}, must be contiguous",
                tensor.dims(),
                tensor.stride()
            );
        }
    }
    Ok(())
}

/// Checks that each tensor is contiguous, and that its elements can be summed.
pub(crate) fn summable(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    contiguous(operation, tensors)?;
    for (index, tensor) in tensors.iter().enumerate() {
        if !matches!(tensor.dtype(), DType::F32 | DType::F64 | DType::BF16) {
            bail!(
                "{operation}: tensor {index} is {:?}, must be f32, f64 or bf16",
                tensor.dtype()
            );
        }
    }
    Ok(())
}

/// Checks that each tensor is contiguous, and that its elements are whole bytes.
pub(crate) fn copyable(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    use DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    contiguous(operation, tensors)?;
    for (index, tensor) in tensors.iter().enumerate() {
        let dtype = tensor.dtype();
        if !matches!(dtype, U8 | U32 | I16 | I32 | I64 | BF16 | F16 | F32 | F64) {
            bail!(
                "{operation}: tensor {index} is {dtype:?}, must be an integer or a float of 16 to 64 bits"
            );
        }
    }
    Ok(())
}

/// Checks that each tensor can be divided into a part for each rank.
pub(crate) fn divisible(operation: &str, tensors: &[&Tensor], world_size: usize) -> Result<()> {
    for (index, tensor) in tensors.iter().enumerate() {
        if !tensor.elem_count().is_multiple_of(world_size) {
            bail!(
                "{operation}: tensor {index} has {} elements, must be a multiple of {world_size} ranks",
                tensor.elem_count()
            );
        }
    }
    Ok(())
}

/// Checks that `root` is a rank.
pub(crate) fn root(operation: &str, root: usize, world_size: usize) -> Result<()> {
    if root >= world_size {
        bail!("{operation}: root {root}, must be below the {world_size} ranks");
    }
    Ok(())
}
