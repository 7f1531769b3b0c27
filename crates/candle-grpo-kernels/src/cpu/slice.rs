//! Tensor elements as slices.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, WithDType, bail};

use super::instructions::CpuInstructions;

/// Elements that one thread processes at a time in elementwise operators.
pub(crate) const CHUNK: usize = 1 << 15;

/// Returns a contiguous tensor's range in its storage.
pub(crate) fn range(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!(
            "a tensor has the strides {:?}, must be contiguous",
            layout.stride()
        ),
    }
}

/// Returns a contiguous CPU tensor's elements, given its storage and layout.
pub(crate) fn elements<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    Ok(&on_cpu(storage)?.as_slice::<T>()?[range(layout)?])
}

/// Calls `read` with a contiguous CPU tensor's elements.
pub(crate) fn read<T: WithDType, R>(
    tensor: &Tensor,
    read: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    read(elements(&storage, layout)?)
}

/// Returns a CPU tensor's storage. Fails if the selected instruction set is not available.
pub(crate) fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    CpuInstructions::selected()?;
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!(
            "a tensor is on {:?}, must be on the CPU",
            storage.device().location()
        ),
    }
}

/// Calls `write` with a contiguous f32 CPU tensor's mutable elements.
pub(crate) fn write_f32<R>(
    tensor: &Tensor,
    write: impl FnOnce(&mut [f32]) -> Result<R>,
) -> Result<R> {
    let mut result = None;
    write_storage(tensor, |storage, range| match storage {
        CpuStorage::F32(values) => {
            result = Some(write(&mut values[range])?);
            Ok(())
        }
        _ => bail!("a tensor of {} elements, must be f32", range.len()),
    })?;
    match result {
        Some(result) => Ok(result),
        None => bail!("an operation in place did not run"),
    }
}

/// Calls `write` with a contiguous CPU tensor's mutable storage and its range there.
pub(crate) fn write_storage(
    tensor: &Tensor,
    write: impl FnOnce(&mut CpuStorage, Range<usize>) -> Result<()>,
) -> Result<()> {
    CpuInstructions::selected()?;
    tensor.inplace_op1(&Write(RefCell::new(Some(write))))
}

/// Holds the closure in a cell, because an in-place operation only has a shared reference to
/// itself.
struct Write<F>(RefCell<Option<F>>);

impl<F: FnOnce(&mut CpuStorage, Range<usize>) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let range = range(layout)?;
        match self.0.take() {
            Some(write) => write(storage, range),
            None => bail!("an operation in place ran twice"),
        }
    }
}

/// Runs `$body` with the floats in a [`CpuStorage`](candle_core::CpuStorage) as `$values`. For
/// other dtypes, returns an error that names the argument.
macro_rules! with_floats {
    ($storage:expr, $name:literal, $values:ident => $body:expr) => {
        match $storage {
            candle_core::CpuStorage::F32($values) => $body,
            candle_core::CpuStorage::BF16($values) => $body,
            candle_core::CpuStorage::F16($values) => $body,
            other => candle_core::bail!(
                "{}: {:?}, must be f32, bf16 or f16",
                $name,
                candle_core::backend::BackendStorage::dtype(other)
            ),
        }
    };
}
pub(crate) use with_floats;

/// Runs `$body` with a dtype's Rust type as `$element`. For other dtypes, returns an error that
/// names the argument.
macro_rules! with_element {
    ($dtype:expr, $name:literal, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            other => candle_core::bail!("{}: {other:?}, must be f32, bf16 or f16", $name),
        }
    };
}
pub(crate) use with_element;
