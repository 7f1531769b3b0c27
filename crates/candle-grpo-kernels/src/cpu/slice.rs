//! The elements behind a tensor.

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType, bail};

/// Where a contiguous tensor lies in its storage.
pub(crate) fn range(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!(
            "a layout of strides {:?} was not made contiguous",
            layout.stride()
        ),
    }
}

/// Calls `read` with the elements of a contiguous tensor on the CPU.
pub(crate) fn read<T: WithDType, R>(
    tensor: &Tensor,
    read: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    read(&on_cpu(&storage)?.as_slice::<T>()?[range(layout)?])
}

/// The storage of a tensor on the CPU.
pub(crate) fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!(
            "a tensor is on {:?}, must be on the CPU",
            storage.device().location()
        ),
    }
}

/// Runs `$body` with the vector of floats in a [`CpuStorage`](candle_core::CpuStorage) as `$values`, or errs with the
/// name of the argument.
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

/// Runs `$body` with the Rust type of a dtype as `$element`, or errs with the name of the argument.
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
