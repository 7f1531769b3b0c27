//! Weights to be written to files.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use candle_core::{DType, Error, Result, Shape, Tensor, Var, bail};

use crate::config::architecture::{EMBEDDING, OUTPUT};
use crate::weights::base_weights::{numbers, shape};
use crate::weights::check::converted;
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::{DecoderConfig, Parameters};

/// A model's weights in one dtype, to be written to a file. [`Lora::export`](crate::Lora::export)
/// merges adapters into them.
///
/// Each tensor is computed while it is written. The whole model is never copied, whatever its dtype
/// or [form](crate::BaseWeights) in memory.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_grpo_nn::{DecoderConfig, Lora, LoraConfig, Parameters};
///
/// let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
///     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
///     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let base = Parameters::init(&model, 7, &Device::Cpu)?;
/// let adapters = Lora::init(LoraConfig::all_linear(4, 8.0), &model, 7, &Device::Cpu)?;
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// adapters.export(&base).in_dtype(DType::BF16).save(&path)?;
/// // New adapters change nothing, so each number is that of the base, rounded.
/// let read = Parameters::load(&model, &path, &Device::Cpu)?;
/// let norm = read.get("model.norm.weight").expect("every model has one");
/// assert_eq!(norm.to_vec1::<f32>()?, [1.0; 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Export<'a> {
    parameters: &'a Parameters,
    change: Option<Change<'a>>,
    dtype: DType,
    has_output_copy: bool,
    has_masters: bool,
}

/// Returns the tensor to write for this parameter name.
type Change<'a> = Rc<dyn Fn(&str, Tensor) -> Result<Tensor> + 'a>;

impl<'a> Export<'a> {
    /// Exports `parameters` in their dtype, or in f32 if some are quantized blocks. If ranks divide
    /// the f32 weights, these are the rounded copies: see [`Self::with_masters`]. F32 weights in
    /// host memory are exported in f32.
    pub fn new(parameters: &'a Parameters) -> Self {
        let mut weights = parameters.iter();
        let dtype = if weights.any(|(_, weight)| weight.dtype() == DType::U8) {
            DType::F32
        } else {
            parameters.dtype()
        };
        let export = Self {
            parameters,
            change: None,
            dtype,
            has_output_copy: false,
            has_masters: false,
        };
        if parameters.has_whole_masters() {
            export.with_masters()
        } else {
            export
        }
    }

    /// Applies `change` to each weight, given its name and values.
    pub(crate) fn with_change(self, change: impl Fn(&str, Tensor) -> Result<Tensor> + 'a) -> Self {
        let change = Some(Rc::new(change) as Change<'a>);
        Self { change, ..self }
    }

    /// Exports in another floating-point dtype.
    #[must_use]
    pub fn in_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Exports f32 weights that ranks [divide](crate::AdamWConfig::divide), in f32, in place of
    /// their rounded copies, and gathers [others](Parameters::is_full) that they divide. Only rank
    /// 0 may compute tensors, while the others [take part](Parameters::take_part_in_export).
    /// Other weights are as before.
    #[must_use]
    pub fn with_masters(self) -> Self {
        let dtype = if self.parameters.is_divided() {
            self.parameters.whole_dtype()
        } else {
            self.dtype
        };
        Self {
            dtype,
            has_masters: true,
            ..self
        }
    }

    /// Writes the output layer as its own weight if `model` ties it to the embedding. Returns the
    /// untied model with its weights; other models are unchanged.
    pub fn with_untied_output(self, model: &DecoderConfig) -> (DecoderConfig, Self) {
        let untied = DecoderConfig {
            tie_word_embeddings: false,
            ..model.clone()
        };
        let has_output_copy = model.tie_word_embeddings;
        (
            untied,
            Self {
                has_output_copy,
                ..self
            },
        )
    }

    /// The dtype for all tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.parameters.len() + usize::from(self.has_output_copy)
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let copy = self.has_output_copy.then_some(OUTPUT);
        self.parameters.iter().map(|(name, _)| name).chain(copy)
    }

    /// Returns the shape of the tensor `name`.
    ///
    /// # Errors
    ///
    /// If there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<Shape> {
        shape(self.parameter(name)?)
    }

    /// Computes the tensor `name` on the parameters' device.
    ///
    /// # Errors
    ///
    /// If there is no such tensor, the adapters belong to another model, or a value exceeds the F16
    /// range.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let tensor = self.unconverted(name)?.to_device(self.parameters.device());
        converted(&tensor?, self.dtype).map_err(|error| Error::msg(format!("{name}: {error}")))
    }

    /// The tensor `name`, not necessarily in [`Self::dtype`].
    fn unconverted(&self, name: &str) -> Result<Tensor> {
        let weight = self.parameter(name)?;
        let name = self.source(name);
        // The rounded copy of a weight that this process has in f32, too, is not rounded again.
        let is_rounded = self.parameters.has_whole_masters() && weight.dtype() == self.dtype;
        let is_gathered = (self.has_masters && !is_rounded) || self.parameters.asks();
        if !is_gathered {
            self.parameters.ensure_held(name)?;
        }
        let master = if is_gathered {
            self.parameters.gathered(name)?
        } else {
            None
        };
        let weight = match master {
            Some(master) => master,
            None => numbers(&weight.as_detached_tensor(), DType::F32)?,
        };
        match &self.change {
            Some(change) => change(name, weight),
            None => Ok(weight),
        }
    }

    /// The parameter from which the tensor `name` is computed.
    fn parameter(&self, name: &str) -> Result<&'a Var> {
        let name = self.source(name);
        let Some(weight) = self.parameters.get(name) else {
            bail!("parameters: no {name}, must have it");
        };
        Ok(weight)
    }

    /// The name of the parameter from which the tensor `name` is computed.
    fn source<'n>(&self, name: &'n str) -> &'n str {
        if name == OUTPUT && self.has_output_copy {
            EMBEDDING
        } else {
            name
        }
    }

    /// Writes one safetensors file that [`Parameters::load`] and Hugging Face transformers read.
    ///
    /// The file is written [atomically](crate::atomic_file).
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors = self.lazy_tensors(str::to_owned)?;
        safetensors_writer::write(path, tensors, || Ok(())).map_err(|error| unsaved(path, &error))
    }

    /// All tensors, renamed for the file by `named`.
    pub(crate) fn lazy_tensors(
        &self,
        named: impl Fn(&str) -> String,
    ) -> Result<Vec<LazyTensor<'a>>> {
        let lazy = |name: &'a str| {
            let kind = (self.dtype, self.shape(name)?.into_dims());
            let weights = self.clone();
            let tensor = move || weights.unconverted(name);
            Ok(LazyTensor::computed(named(name), kind, tensor))
        };
        self.names().map(lazy).collect()
    }
}

impl fmt::Debug for Export<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Export({} tensors of {:?})", self.len(), self.dtype)
    }
}

/// The error for a parameter file that cannot be written.
pub(crate) fn unsaved(path: &Path, error: &Error) -> Error {
    Error::msg(format!(
        "cannot save parameters to {}: {error}",
        path.display()
    ))
}
