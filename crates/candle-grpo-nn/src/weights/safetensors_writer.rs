//! Writes safetensors files piece by piece.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Error, Result, Write};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, View};

use crate::weights::check::{CHUNK, converted};
use candle_grpo_base::atomic_file::write_with;

/// The file header is padded to a multiple of this many bytes.
const ALIGNMENT: usize = 8;

/// A tensor whose bytes are computed while it is written, because all tensors together may not fit
/// into memory.
pub(crate) struct LazyTensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    write: Box<WriteValues<'a>>,
}

/// Writes a tensor's values.
type WriteValues<'a> = dyn Fn(&mut dyn Write) -> Result<()> + 'a;

impl<'a> LazyTensor<'a> {
    /// `write` writes the values, in `dtype`.
    pub(crate) fn new(
        name: String,
        (dtype, shape): (Dtype, Vec<usize>),
        write: impl Fn(&mut dyn Write) -> Result<()> + 'a,
    ) -> Self {
        let write = Box::new(write);
        Self {
            name,
            dtype,
            shape,
            write,
        }
    }

    /// `tensor` returns the tensor, on any device. Its values are converted to `dtype` piece by
    /// piece.
    pub(crate) fn computed(
        name: String,
        (dtype, shape): (DType, Vec<usize>),
        tensor: impl Fn() -> candle_core::Result<Tensor> + 'a,
    ) -> Self {
        let expected = shape.clone();
        let write = move |out: &mut dyn Write| {
            let tensor = tensor().map_err(Error::other)?;
            if tensor.dims() != expected {
                let found = tensor.dims();
                return Err(Error::other(format!(
                    "shape {found:?}, must be {expected:?}"
                )));
            }
            write_in(dtype, &tensor, out)
        };
        Self::new(name, (dtype.into(), shape), write)
    }

    /// A tensor on any device.
    pub(crate) fn of(name: String, tensor: Tensor) -> Self {
        let kind = (tensor.dtype(), tensor.dims().to_vec());
        Self::computed(name, kind, move || Ok(tensor.clone()))
    }

    fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes a tensor's values in `dtype`.
fn write_in(dtype: DType, tensor: &Tensor, out: &mut dyn Write) -> Result<()> {
    let numbers = tensor.flatten_all().map_err(Error::other)?;
    let count = numbers.elem_count();
    for start in (0..count).step_by(CHUNK) {
        let part = numbers.narrow(0, start, CHUNK.min(count - start));
        let part = part
            .and_then(|part| converted(&part, dtype)?.to_device(&Device::Cpu))
            .map_err(Error::other)?;
        out.write_all(&View::data(&part))?;
    }
    Ok(())
}

/// The order of tensors in a file, given their dtypes and names. Each is aligned to its dtype.
pub(crate) fn file_order(left: (Dtype, &str), right: (Dtype, &str)) -> Ordering {
    let dtype = right.0.cmp(&left.0);
    dtype.then_with(|| left.1.cmp(right.1))
}

/// Writes one safetensors file [atomically](crate::atomic_file), in the library's tensor order.
///
/// No file is created if a tensor cannot be computed or if `check`, which runs after the tensors
/// were written, fails.
pub(crate) fn write(
    path: &Path,
    mut tensors: Vec<LazyTensor<'_>>,
    check: impl FnOnce() -> Result<()>,
) -> candle_core::Result<()> {
    tensors.sort_by(|left, right| file_order((left.dtype, &left.name), (right.dtype, &right.name)));
    let fill = |temporary: &Path| {
        let mut out = BufWriter::new(File::create(temporary)?);
        let header = header(&tensors)?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for tensor in &tensors {
            (tensor.write)(&mut out)
                .map_err(|error| Error::new(error.kind(), format!("{}: {error}", tensor.name)))?;
        }
        out.flush()?;
        check()
    };
    write_with(path, fill).map_err(candle_core::Error::wrap)
}

fn header(tensors: &[LazyTensor<'_>]) -> Result<Vec<u8>> {
    // transformers rejects a file whose metadata has no known framework.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.num_bytes();
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        (tensor.name.clone(), info)
    });
    let metadata = Metadata::new(Some(metadata), infos.collect()).map_err(Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestResult = std::result::Result<(), Box<dyn std::error::Error>>;

    fn tensors() -> candle_core::Result<Vec<(String, Tensor)>> {
        // One tensor is written in several pieces; one is a scalar, one is empty, one is not
        // contiguous.
        let device = Device::Cpu;
        let wide = Tensor::arange(0f32, (CHUNK + 5) as f32, &device)?;
        Ok(vec![
            ("b".to_owned(), wide),
            ("steps".to_owned(), Tensor::new(7i64, &device)?),
            (
                "a".to_owned(),
                Tensor::new(&[[1f32, 2.], [3., 4.]], &device)?.t()?,
            ),
            ("codes".to_owned(), Tensor::new(&[1u8, 2, 3], &device)?),
            (
                "none".to_owned(),
                Tensor::zeros((0, 3), DType::F32, &device)?,
            ),
        ])
    }

    #[test]
    fn a_file_has_the_bytes_of_the_library() -> TestResult {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("file");
        let lazy = tensors()?.into_iter();
        let lazy = lazy.map(|(name, tensor)| LazyTensor::of(name, tensor));
        write(&path, lazy.collect(), || Ok(()))?;
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let expected = safetensors::serialize(tensors()?, Some(metadata))?;
        assert!(std::fs::read(&path)? == expected, "other bytes");
        Ok(())
    }

    #[test]
    fn an_error_names_the_tensor_and_leaves_no_file() -> TestResult {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("file");
        let device = Device::Cpu;
        let other_shape = || {
            LazyTensor::computed("w".to_owned(), (DType::F32, vec![3]), || {
                Tensor::zeros(2, DType::F32, &device)
            })
        };
        let error = write(&path, vec![other_shape()], || Ok(())).unwrap_err();
        assert!(
            error.to_string().contains("w: shape [2], must be [3]"),
            "{error}"
        );
        let fine = LazyTensor::of("w".to_owned(), Tensor::new(&[1f32], &device)?);
        let error = write(&path, vec![fine], || Err(Error::other("changed"))).unwrap_err();
        assert!(error.to_string().contains("changed"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
        Ok(())
    }
}
