//! Checks each operation's arguments before a rank communicates.

use candle_core::{DType, Result, Tensor, bail};

pub(crate) fn all_reduce_sum(tensors: &[&Tensor]) -> Result<()> {
    summable("all_reduce_sum", tensors)
}

pub(crate) fn reduce_scatter_sum(tensors: &[&Tensor], world_size: usize) -> Result<()> {
    summable("reduce_scatter_sum", tensors)?;
    divisible("reduce_scatter_sum", tensors, world_size)
}

pub(crate) fn all_gather(tensors: &[&Tensor], world_size: usize) -> Result<()> {
    copyable("all_gather", tensors)?;
    divisible("all_gather", tensors, world_size)
}

pub(crate) fn broadcast(tensors: &[&Tensor], root: usize, world_size: usize) -> Result<()> {
    copyable("broadcast", tensors)?;
    if root >= world_size {
        bail!("broadcast: root {root}, must be below the {world_size} ranks");
    }
    Ok(())
}

/// Checks that each tensor is contiguous.
fn contiguous(operation: &str, tensors: &[&Tensor]) -> Result<()> {
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

/// Checks that each tensor is contiguous and can be summed.
fn summable(operation: &str, tensors: &[&Tensor]) -> Result<()> {
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
fn copyable(operation: &str, tensors: &[&Tensor]) -> Result<()> {
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
fn divisible(operation: &str, tensors: &[&Tensor], world_size: usize) -> Result<()> {
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
