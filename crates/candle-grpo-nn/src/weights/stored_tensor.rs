//! Tensors in safetensors files, read on demand.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use safetensors::Dtype;

use crate::config::stack::Part;
use crate::weights::check::check_finite;
use crate::weights::safetensors::{in_file, open_header};
use crate::weights::stacks::Entry;

/// A tensor in a safetensors file, which stays open.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    file: Arc<OpenFile>,
    /// Name in the file.
    name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Byte offset in the file.
    start: u64,
    /// Length in bytes.
    length: usize,
}

/// A file to be read later.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: Mutex<File>,
    length: u64,
    modified: Option<SystemTime>,
}

impl StoredTensor {
    /// Lists the tensors in a safetensors file. Errors name the file.
    pub(crate) fn read_file(path: &Path) -> Result<HashMap<String, Self>> {
        let (file, start, headers) = open_header(path)?;
        let metadata = file
            .metadata()
            .map_err(|error| in_file(path, error.into()))?;
        let file = Arc::new(OpenFile {
            path: path.to_owned(),
            length: metadata.len(),
            modified: metadata.modified().ok(),
            file: Mutex::new(file),
        });
        let tensors = headers.into_iter().map(|(name, header)| {
            let (dtype, bytes) = header
                .stored()
                .map_err(|error| in_file(path, of_tensor(&name, error)))?;
            let tensor = Self {
                file: file.clone(),
                name: name.clone(),
                dtype,
                start: start + bytes.start,
                length: (bytes.end - bytes.start) as usize,
                shape: header.shape,
            };
            Ok((name, tensor))
        });
        tensors.collect()
    }

    /// Reads the values, on the CPU.
    ///
    /// # Errors
    ///
    /// If the dtype is not a floating-point type, a value is not finite, or the file cannot be
    /// read. The error names both file and tensor.
    pub(crate) fn read(&self) -> Result<Tensor> {
        let read = || {
            let dtype = DType::try_from(self.dtype).ok().filter(DType::is_float);
            let Some(dtype) = dtype else {
                bail!("dtype {}, must be a floating-point type", self.dtype);
            };
            let tensor = Tensor::from_raw_buffer(&self.bytes()?, dtype, &self.shape, &Device::Cpu)?;
            check_finite(&tensor)?;
            Ok(tensor)
        };
        read().map_err(|error| self.named(error))
    }

    /// Adds the names of the file and the tensor to an error.
    fn named(&self, error: Error) -> Error {
        in_file(&self.file.path, of_tensor(&self.name, error))
    }

    pub(crate) fn bytes(&self) -> io::Result<Vec<u8>> {
        self.check_unchanged()?;
        let mut bytes = vec![0; self.length];
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(self.start))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes the bytes to `out`.
    pub(crate) fn copy_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.check_unchanged()?;
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(self.start))?;
        let copied = io::copy(&mut (&mut *file).take(self.length as u64), out)?;
        if copied == self.length as u64 {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    pub(crate) fn check_unchanged(&self) -> io::Result<()> {
        self.file.check_unchanged()
    }
}

/// A tensor in memory or in a file.
pub(crate) trait Values: Entry {
    /// # Errors
    ///
    /// If Candle does not have the dtype.
    fn dtype(&self) -> Result<DType>;

    /// Reads these elements, one after the other. Does not check that they are finite.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    fn read_elements(&self, elements: Range<usize>) -> Result<Tensor>;
}

impl Values for Tensor {
    fn dtype(&self) -> Result<DType> {
        Ok(self.dtype())
    }

    fn read_elements(&self, elements: Range<usize>) -> Result<Tensor> {
        let flat = self.contiguous()?.flatten_all()?;
        flat.narrow(0, elements.start, elements.len())
    }
}

impl Values for StoredTensor {
    fn dtype(&self) -> Result<DType> {
        DType::try_from(self.dtype).map_err(|error| self.named(error))
    }

    fn read_elements(&self, elements: Range<usize>) -> Result<Tensor> {
        let dtype = Values::dtype(self)?;
        let size = dtype.size_in_bytes();
        let part = Self {
            start: self.start + (elements.start * size) as u64,
            length: elements.len() * size,
            ..self.clone()
        };
        let bytes = part.bytes().map_err(|error| self.named(error.into()))?;
        Tensor::from_raw_buffer(&bytes, dtype, &[elements.len()], &Device::Cpu)
    }
}

impl Entry for StoredTensor {
    fn dims(&self) -> &[usize] {
        &self.shape
    }

    fn part(&self, part: &Part) -> Result<Self> {
        let [matrices, rows, columns] = self.shape[..] else {
            bail!(
                "tensor {}: shape {:?}, must have 3 dimensions",
                self.name,
                self.shape
            );
        };
        let row = self.length / (matrices * rows).max(1);
        Ok(Self {
            start: self.start + ((part.index * rows + part.rows.start) * row) as u64,
            length: part.rows.len() * row,
            shape: vec![part.rows.len(), columns],
            ..self.clone()
        })
    }
}

fn of_tensor(name: &str, error: Error) -> Error {
    Error::msg(format!("tensor {name}: {error}"))
}

impl OpenFile {
    fn lock(&self) -> MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_unchanged(&self) -> io::Result<()> {
        let now = self.lock().metadata()?;
        if now.len() == self.length && now.modified().ok() == self.modified {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "{}: has changed since it was opened, must stay as it was: weights are read from it when they are needed",
            self.path.display()
        )))
    }
}
