//! Models in GGUF files, the format of llama.cpp.

mod bytes;
mod config;
mod header;
mod rope;
mod tensors;
mod value;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::{Device, Error, Result};

use crate::{DecoderConfig, Parameters};
use header::Header;
pub use value::GgufValue;

/// A GGUF file whose header has been read: its metadata, and the places of its tensors.
///
/// The header is validated against the length of the file, so that a truncated or malicious file
/// allocates no more memory than a valid one of its length. Candle's own reader does not check the
/// alignment and the shapes of a file.
///
/// ```no_run
/// use candle_core::Device;
/// use candle_grpo_nn::{Decoder, Gguf};
///
/// # fn main() -> candle_core::Result<()> {
/// let file = Gguf::open("model.gguf".as_ref())?;
/// let (config, parameters) = (file.config()?, file.parameters(&Device::Cpu)?);
/// let decoder = Decoder::new(&config, parameters.var_builder())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    header: Header,
}

impl Gguf {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// If this is not a GGUF file of version 2 or 3, if it is truncated, or if the type of a tensor
    /// cannot be dequantized.
    pub fn open(path: &Path) -> Result<Self> {
        let read = || -> Result<Header> {
            let file = File::open(path)?;
            let length = file.metadata()?.len();
            Header::read(BufReader::new(file), length)
        };
        Ok(Self {
            header: read().map_err(|error| context(path, error))?,
            path: path.to_path_buf(),
        })
    }

    /// The metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.header.metadata
    }

    /// Reads the configuration of the decoder, for the architectures `llama`, `qwen2`, `qwen3` and
    /// `smollm3`.
    ///
    /// # Errors
    ///
    /// Names the key that asks for a computation that [`Decoder`](crate::Decoder) does not have.
    pub fn config(&self) -> Result<DecoderConfig> {
        let rope_factors = || tensors::rope_factors(&self.path, &self.header);
        config::read(&self.header, rope_factors).map_err(|error| context(&self.path, error))
    }

    /// Checks the names and shapes of the weights without reading them.
    ///
    /// # Errors
    ///
    /// As in [`Self::parameters`], except for values that are not finite.
    pub fn check_parameters(&self) -> Result<()> {
        tensors::places(&self.header, &self.config()?)
            .map(drop)
            .map_err(|error| context(&self.path, error))
    }

    /// Reads the weights, dequantized to f32, under their Hugging Face names.
    ///
    /// The files of some families store the rows of query and key in another order, for interleaved
    /// rotation. They are reordered.
    ///
    /// # Errors
    ///
    /// Names a tensor that is missing, surplus, of another shape or not finite.
    pub fn parameters(&self, device: &Device) -> Result<Parameters> {
        let config = self.config()?;
        tensors::read(&self.path, &self.header, &config)
            .and_then(|tensors: HashMap<_, _>| Parameters::from_tensors(&config, tensors, device))
            .map_err(|error| context(&self.path, error))
    }
}

fn context(path: &Path, error: Error) -> Error {
    Error::msg(format!("{}: {error}", path.display()))
}
