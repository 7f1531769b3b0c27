//! Models in GGUF files, llama.cpp's format.

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
use candle_core::{DType, Device, Error, Result, Tensor, bail};

use crate::weights::base_weights::FrozenForm;
use crate::{BaseWeights, DecoderConfig, Parameters, WeightDivision};
use candle_grpo_base::atomic_file::write_with;
use header::{Header, TensorPlace};
pub use value::GgufValue;

/// A GGUF file with its header loaded: metadata and tensor locations.
///
/// The header is validated against the file length, so a truncated or malicious file allocates no
/// more memory than a valid one of the same length. Candle's own reader does not check alignment
/// and shapes.
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
    /// If this is not a GGUF file with version 2 or 3, it is truncated, or a tensor's type cannot
    /// be dequantized.
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

    /// Metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.header.metadata
    }

    /// Reads the decoder configuration.
    ///
    /// # Errors
    ///
    /// Names the key that requires a computation that [`Decoder`](crate::Decoder) does not support.
    pub fn config(&self) -> Result<DecoderConfig> {
        let divisors = |name: &str| tensors::values(&self.path, &self.header, name);
        config::read(&self.header, divisors).map_err(|error| context(&self.path, error))
    }

    /// Checks weight names and shapes without reading the weights.
    ///
    /// # Errors
    ///
    /// Same as [`Self::parameters`], except for values that are not finite.
    pub fn check_parameters(&self) -> Result<()> {
        tensors::check(&self.header, &self.config()?).map_err(|error| context(&self.path, error))
    }

    /// Reads the weights, dequantized to f32, under their Hugging Face names.
    ///
    /// In some families, GGUF files order query and key rows for interleaved rotation, add 1 to
    /// norms, or store a block's experts as one tensor. The parameters returned match a Hugging
    /// Face folder.
    ///
    /// # Errors
    ///
    /// Names a tensor that is missing, surplus, has a different shape, or is not finite.
    pub fn parameters(&self, device: &Device) -> Result<Parameters> {
        self.frozen_parameters(BaseWeights::Dense, DType::F32, device)
    }

    /// Like [`Self::parameters`], for frozen weights as in [`Parameters::frozen_as`]. With
    /// [`BaseWeights::Stored`], linear maps keep the file's blocks.
    ///
    /// # Errors
    ///
    /// Same as [`Self::parameters`] and [`Parameters::frozen_as`].
    pub fn frozen_parameters(
        &self,
        base: BaseWeights,
        dtype: DType,
        device: &Device,
    ) -> Result<Parameters> {
        self.fill(Parameters::to_fill(None, device), base, dtype)
    }

    /// Like [`Self::parameters`], for weights that ranks divide, as
    /// [`Parameters::load_folder_divided`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::parameters`].
    pub fn divided_parameters(
        &self,
        division: &WeightDivision,
        device: &Device,
    ) -> Result<Parameters> {
        let parameters = Parameters::to_fill(Some(division), device);
        self.fill(parameters, BaseWeights::Dense, DType::F32)
    }

    /// Inserts all weights, each after it is read.
    fn fill(
        &self,
        mut parameters: Parameters,
        base: BaseWeights,
        dtype: DType,
    ) -> Result<Parameters> {
        let config = self.config()?;
        let form = FrozenForm::new(&config, base, dtype)?;
        let shapes = config.parameter_shapes();
        let insert = |name: &str, weight: &Tensor| {
            parameters.insert_in(&form, name.to_owned(), weight, &shapes[name])
        };
        tensors::read(&self.path, &self.header, &config, &form, insert)
            .map_err(|error| context(&self.path, error))?;
        Ok(parameters)
    }

    /// Size of [`Self::frozen_parameters`] in bytes, computed without reading the weights.
    ///
    /// # Errors
    ///
    /// Same as [`Self::check_parameters`].
    pub fn frozen_bytes(&self, base: BaseWeights, dtype: DType) -> Result<usize> {
        let config = self.config()?;
        let form = FrozenForm::new(&config, base, dtype)?;
        tensors::num_bytes(&self.header, &config, &form).map_err(|error| context(&self.path, error))
    }
}

/// Matrix type in a GGUF file that is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufDType {
    /// 32-bit floating point, which keeps the parameters bit-identical.
    F32,
    /// 16-bit floating point.
    #[default]
    F16,
    /// Blocks of 32 8-bit integers with a common factor. Matrices whose row length is not a
    /// multiple of 32 are f16.
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
    /// Writes a model as a GGUF file, atomically. Vectors and expert routers are f32.
    ///
    /// `metadata` is added to the configuration's metadata. Use it for a tokenizer, for example.
    ///
    /// # Errors
    ///
    /// If the family does not support GGUF, GGUF cannot express a `config` field, or a parameter is
    /// missing. The message names the field.
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
    // llama.cpp's code for the most common tensor type.
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

/// A tensor's header entry.
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
