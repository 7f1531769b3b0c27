//! Safetensors files that are written tensor by tensor.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Error, Result};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use safetensors::{Dtype, SafeTensorError, View};

use crate::atomic_file::write_with;
use crate::weights::check::{CHUNK, converted};

/// A tensor of a file whose bytes are computed when they are written, and freed then: all tensors
/// together may not fit into memory.
pub(crate) struct LazyTensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

impl<'a> LazyTensor<'a> {
    /// `bytes` returns the values, in `dtype`.
    pub(crate) fn new(
        name: String,
        (dtype, shape): (Dtype, Vec<usize>),
        bytes: impl Fn() -> Result<Vec<u8>> + 'a,
    ) -> Self {
        let bytes = Box::new(bytes);
        Self {
            name,
            dtype,
            shape,
            bytes,
        }
    }

    /// `tensor` returns the tensor, of any device. Its numbers are converted to `dtype` a part at a
    /// time.
    pub(crate) fn computed(
        name: String,
        (dtype, shape): (DType, Vec<usize>),
        tensor: impl Fn() -> candle_core::Result<Tensor> + 'a,
    ) -> Self {
        let bytes = move || {
            let bytes = tensor().and_then(|tensor| bytes_in(dtype, &tensor));
            bytes.map_err(Error::other)
        };
        Self::new(name, (dtype.into(), shape), bytes)
    }

    /// A tensor of any device.
    pub(crate) fn of(name: String, tensor: Tensor) -> Self {
        let kind = (tensor.dtype(), tensor.dims().to_vec());
        Self::computed(name, kind, move || Ok(tensor.clone()))
    }
}

/// The bytes of a tensor in `dtype`.
fn bytes_in(dtype: DType, tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let numbers = tensor.flatten_all()?;
    let count = numbers.elem_count();
    let mut bytes = Vec::with_capacity(count * dtype.size_in_bytes());
    for start in (0..count).step_by(CHUNK) {
        let part = numbers.narrow(0, start, CHUNK.min(count - start))?;
        let part = converted(&part, dtype)?.to_device(&Device::Cpu)?;
        bytes.extend_from_slice(&View::data(&part));
    }
    Ok(bytes)
}

/// Writes one safetensors file [atomically](crate::atomic_file).
///
/// The file is left out if a tensor cannot be computed or `check` fails, which is called after the
/// tensors were written.
pub(crate) fn write(
    path: &Path,
    tensors: Vec<LazyTensor<'_>>,
    check: impl FnOnce() -> Result<()>,
) -> candle_core::Result<()> {
    let failure = Mutex::new(None);
    let views = tensors.into_iter().map(|tensor| {
        let name = tensor.name.clone();
        let failure = &failure;
        (name, Written { tensor, failure })
    });
    // transformers refuses a file without a known framework in its metadata.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let fill = |temporary: &Path| {
        // The library restricts the mode of its files to their owner.
        let mode = File::create(temporary)?.metadata()?.permissions();
        let written = safetensors::serialize_to_file(views, Some(metadata), temporary);
        if let Some(error) = take(&failure) {
            return Err(error);
        }
        written.map_err(|error| match error {
            SafeTensorError::IoError(error) => error,
            error => Error::other(error),
        })?;
        check()?;
        fs::set_permissions(temporary, mode)
    };
    write_with(path, fill).map_err(candle_core::Error::wrap)
}

/// A tensor that the library writes, which cannot receive an error from it.
struct Written<'a> {
    tensor: LazyTensor<'a>,
    /// The first error of all tensors.
    failure: &'a Mutex<Option<Error>>,
}

fn take(failure: &Mutex<Option<Error>>) -> Option<Error> {
    let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
    failure.take()
}

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = (self.tensor.bytes)().unwrap_or_else(|error| {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            let name = &self.tensor.name;
            failure.get_or_insert(Error::new(error.kind(), format!("{name}: {error}")));
            // The file is not moved to its place.
            Vec::new()
        });
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * self.tensor.dtype.bitsize() / 8
    }
}
