//! Models in GGUF files, the format of llama.cpp.

mod bytes;
mod config;
mod header;
mod keys;
mod rope;
mod tensors;
mod value;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Error, Result, bail};

use crate::weights::base_weights::FrozenForm;
use crate::{BaseWeights, DecoderConfig, Parameters};
use candle_grpo_base::atomic_file::write_with;
use header::{Header, TensorPlace};
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

    /// Reads the configuration of the decoder.
    ///
    /// # Errors
    ///
    /// Names the key that asks for a computation that [`Decoder`](crate::Decoder) does not have.
    pub fn config(&self) -> Result<DecoderConfig> {
        let divisors = |name: &str| tensors::values(&self.path, &self.header, name);
        config::read(&self.header, divisors).map_err(|error| context(&self.path, error))
    }

    /// Checks the names and shapes of the weights without reading them.
    ///
    /// # Errors
    ///
    /// As in [`Self::parameters`], except for values that are not finite.
    pub fn check_parameters(&self) -> Result<()> {
        tensors::check(&self.header, &self.config()?).map_err(|error| context(&self.path, error))
    }

    /// Reads the weights, dequantized to f32, under their Hugging Face names.
    ///
    /// The files of some families have the rows of query and key in another order, for interleaved
    /// rotation, norms that are 1 more, or the experts of a block as one tensor. The parameters are
    /// as in a Hugging Face folder.
    ///
    /// # Errors
    ///
    /// Names a tensor that is missing, surplus, of another shape or not finite.
    pub fn parameters(&self, device: &Device) -> Result<Parameters> {
        self.frozen_parameters(BaseWeights::Dense, DType::F32, device)
    }

    /// [`Self::parameters`] that do not train, as [`Parameters::frozen_as`] returns them. With
    /// [`BaseWeights::Stored`] the linear maps keep the blocks of the file.
    ///
    /// # Errors
    ///
    /// As in [`Self::parameters`] and [`Parameters::frozen_as`].
    pub fn frozen_parameters(
        &self,
        base: BaseWeights,
        dtype: DType,
        device: &Device,
    ) -> Result<Parameters> {
        let config = self.config()?;
        let form = FrozenForm::new(&config, base, dtype)?;
        tensors::read(&self.path, &self.header, &config, &form)
            .and_then(|tensors| Parameters::from_tensors_in(&config, tensors, &form, device))
            .map_err(|error| context(&self.path, error))
    }

    /// The bytes of [`Self::frozen_parameters`], computed without reading the weights.
    ///
    /// # Errors
    ///
    /// As in [`Self::check_parameters`].
    pub fn frozen_bytes(&self, base: BaseWeights, dtype: DType) -> Result<usize> {
        let config = self.config()?;
        let form = FrozenForm::new(&config, base, dtype)?;
        tensors::num_bytes(&self.header, &config, &form).map_err(|error| context(&self.path, error))
    }
}

/// The type of the matrices in a GGUF file that is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GgufDType {
    /// 32-bit floating-point numbers, which keep the bits of the parameters.
    F32,
    /// 16-bit floating-point numbers.
    #[default]
    F16,
    /// Blocks of 32 8-bit integers with a common factor. Matrices whose rows are not a multiple of
    /// 32 are f16.
    Q8_0,
}

impl From<GgufDType> for GgmlDType {
    fn from(dtype: GgufDType) -> Self {
        match dtype {
            GgufDType::F32 => Self::F32,
            GgufDType::F16 => Self::F16,
            GgufDType::Q8_0 => Self::Q8_0,
        }
    }
}

impl Gguf {
    /// Writes a model as a GGUF file, atomically. Vectors and the routers of experts are f32.
    ///
    /// `metadata` is added to what states the configuration, for example a tokenizer.
    ///
    /// # Errors
    ///
    /// If the family has no GGUF files, if a field of `config` cannot be stated in them, or if a
    /// parameter is missing. The message names the field.
    pub fn write(
        path: &Path,
        config: &DecoderConfig,
        parameters: &Parameters,
        dtype: GgufDType,
        metadata: BTreeMap<String, GgufValue>,
    ) -> Result<()> {
        write(path, config, parameters, dtype, metadata).map_err(|error| context(path, error))
    }
}

fn write(
    path: &Path,
    config: &DecoderConfig,
    parameters: &Parameters,
    dtype: GgufDType,
    mut metadata: BTreeMap<String, GgufValue>,
) -> Result<()> {
    config.validate()?;
    let family = config.model_type.family();
    let Some(layout) = &family.gguf else {
        bail!("model_type: {}, has no GGUF files", family.name);
    };
    metadata.extend(config::metadata(layout, config)?);
    // llama.cpp's numbers of what most tensors are.
    let file_type = match dtype {
        GgufDType::F32 => 0,
        GgufDType::F16 => 1,
        GgufDType::Q8_0 => 7,
    };
    let key = "general.file_type".to_owned();
    metadata.insert(key, GgufValue::Integer(file_type));
    let tensors = tensors::quantize(config, parameters, dtype.into())?;
    let header = Header {
        tensors: tensors.iter().map(place).collect(),
        metadata,
    };
    let divisors = rope::divisors(config);
    let found = config::read(&header, |name| Ok(divisors.get(name).cloned()))?;
    config::check_same(config, &found)?;
    tensors::check(&header, &found)?;

    let values: Vec<_> = header
        .metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value.into()))
        .collect();
    let values: Vec<_> = values.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, x)| (name.as_str(), x)).collect();
    let fill = |temporary: &Path| -> io::Result<()> {
        let mut file = BufWriter::new(File::create(temporary)?);
        gguf_file::write(&mut file, &values, &tensors).map_err(io::Error::other)?;
        file.flush()
    };
    write_with(path, fill).map_err(Error::wrap)
}

/// The entry of a tensor in a header.
fn place((name, tensor): &(String, QTensor)) -> (String, TensorPlace) {
    let place = TensorPlace {
        dtype: tensor.dtype(),
        dims: tensor.shape().dims().to_vec(),
        start: 0,
        length: tensor.storage_size_in_bytes(),
    };
    (name.clone(), place)
}

fn context(path: &Path, error: Error) -> Error {
    Error::msg(format!("{}: {error}", path.display()))
}
