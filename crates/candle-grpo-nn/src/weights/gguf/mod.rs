//! Models in one GGUF file, the format of llama.cpp.

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

/// A GGUF file whose header has been read: metadata, and the places of its tensors.
///
/// The header is not believed: what it says must lie within the file, so that a file that is torn or made up takes no
/// more memory than a whole one of its length. (Candle's own reader is not used for it: it divides by the alignment that
/// a file states, multiplies shapes without looking, and turns each number of an array into 32 bytes.)
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
    /// Reads the header. Errs if this is no GGUF file of version 2 or 3, if it ends too early, or if it has a tensor of a
    /// type that cannot be turned into floating-point numbers.
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

    /// Everything that the file says of itself, by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.header.metadata
    }

    /// The shape of the decoder. Architectures `llama`, `qwen2`, `qwen3` and `smollm3` are read.
    ///
    /// Errs with the key that asks for what a [`Decoder`](crate::Decoder) does not compute.
    pub fn config(&self) -> Result<DecoderConfig> {
        let rope_factors = || tensors::rope_factors(&self.path, &self.header);
        config::read(&self.header, rope_factors).map_err(|error| context(&self.path, error))
    }

    /// The weights in f32 under their Hugging Face names, dequantised.
    ///
    /// Of the families whose files hold the rows of query and key in another order, for interleaved rotation, they are
    /// put back. Errs with the name of a tensor that is missing, surplus, misshapen or not finite.
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
