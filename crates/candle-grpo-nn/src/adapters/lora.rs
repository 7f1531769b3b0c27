//! Low-rank adapters.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_core::Invalid;
use candle_grpo_core::validate;
use candle_grpo_kernels::add_matmul;
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

use crate::adapters::peft::{ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX, PeftConfig};
use crate::config::architecture::linear_maps;
use crate::model::linear::{LORA_A, LORA_B, LORA_SCALING};
use crate::weights::base_weights::{builder, numbers, shape};
use crate::weights::check::check_names;
use crate::weights::compute_copies::{ensure_copy_dtype, value_in};
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::weights::standard_normal::StandardNormal;
use crate::{ComputeCopies, DecoderConfig, Export, MergedCopies, Parameters};
use candle_grpo_base::atomic_file;

/// LoRA options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank of each update matrix.
    pub rank: usize,
    /// The update is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Suffixes that select the linear maps to adapt, such as `q_proj` or `self_attn.q_proj`.
    /// `all-linear` selects every linear map in every block.
    #[serde(default = "all_linear")]
    pub target_modules: Vec<String>,
}

const ALL_LINEAR: &str = "all-linear";

fn all_linear() -> Vec<String> {
    vec![ALL_LINEAR.to_owned()]
}

impl LoraConfig {
    /// Adapts every linear map in every block, but not the embedding or the output layer.
    pub fn all_linear(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            target_modules: all_linear(),
        }
    }

    /// Checks that these options fit `model`. The error names the first field that does not.
    pub fn validate(&self, model: &DecoderConfig) -> Result<()> {
        self.parameter_shapes(model).map(|_| ())
    }

    fn scaling(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Returns whether the linear map `module` has an adapter.
    pub(crate) fn targets(&self, module: &str) -> bool {
        self.target_modules
            .iter()
            .any(|target| matches(target, module))
    }

    /// Expands `all-linear` to map names, because PEFT's own expansion depends on the model.
    fn named(mut self, model: &DecoderConfig) -> Self {
        if self
            .target_modules
            .iter()
            .any(|target| target == ALL_LINEAR)
        {
            let modules = linear_maps(model);
            let names = modules
                .iter()
                .filter_map(|(name, _)| name.rsplit('.').next());
            let names: BTreeSet<&str> = names.collect();
            self.target_modules = names.into_iter().map(str::to_owned).collect();
        }
        self
    }

    /// Returns the names and shapes of A and B for each adapted map.
    ///
    /// # Errors
    ///
    /// Same as [`Self::validate`].
    pub fn parameter_shapes(&self, model: &DecoderConfig) -> Result<BTreeMap<String, Shape>> {
        model.validate()?;
        validate::at_least_one("rank", self.rank)?;
        validate::positive("alpha", self.alpha)?;
        let modules = linear_maps(model);
        if self.target_modules.is_empty() {
            let must = "name at least one linear map";
            return Err(Invalid::new("target_modules", "[]", must).into());
        }
        for target in &self.target_modules {
            if !modules.iter().any(|(module, _)| matches(target, module)) {
                let must = "be the end of the name of a linear map in a block of this model";
                return Err(Invalid::new("target_modules", format!("{target:?}"), must).into());
            }
        }
        let mut shapes = BTreeMap::new();
        for (module, shape) in self.maps(model) {
            let (outputs, inputs) = shape.dims2()?;
            shapes.insert(
                format!("{module}.{LORA_A}"),
                Shape::from((self.rank, inputs)),
            );
            shapes.insert(
                format!("{module}.{LORA_B}"),
                Shape::from((outputs, self.rank)),
            );
        }
        Ok(shapes)
    }

    /// Names and weight shapes of the maps that get adapters.
    pub(crate) fn maps(&self, model: &DecoderConfig) -> impl Iterator<Item = (String, Shape)> {
        let maps = linear_maps(model).into_iter();
        maps.filter(|(module, _)| self.targets(module))
    }
}

/// Returns whether `target` selects `module`, the dotted name of a linear map within its block.
fn matches(target: &str, module: &str) -> bool {
    let is_suffix = module
        .strip_suffix(target)
        .is_some_and(|before| before.is_empty() || before.ends_with('.'));
    is_suffix || target == ALL_LINEAR
}

/// Returns `weight` in f32 and memory of its own.
fn in_new_memory(weight: &Tensor) -> Result<Tensor> {
    match weight.dtype() {
        DType::F32 => weight.force_contiguous(),
        _ => weight.to_dtype(DType::F32),
    }
}

/// Returns the weight of `base` that an adapter extends.
fn extended<'b>(base: &'b Parameters, name: &str) -> Result<&'b Var> {
    let Some(weight) = base.get(name) else {
        bail!("base: no {name}, must have it as there is an adapter for it");
    };
    Ok(weight)
}

/// Low-rank adapters (LoRA, Hu et al. 2021). An adapted map computes
/// `x w^T + alpha / rank * x a^T b^T`, and only a and b are trained. b starts at zero, so new
/// adapters do not change the model.
///
/// The base weights are shared, not copied. A decoder built with [`Self::var_builder`] applies the
/// adapters. One built with the base's [`Parameters::detached_var_builder`] does not, so it can
/// serve as the reference policy without extra memory.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use candle_grpo_nn::{Decoder, DecoderConfig, Gradients, Lora, LoraConfig, Parameters};
///
/// # fn main() -> Result<()> {
/// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let base = Parameters::init(&model, 7, &Device::Cpu)?;
/// let lora = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, &Device::Cpu)?;
/// let decoder = Decoder::new(&model, lora.var_builder(&base)?)?;
///
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// let loss = decoder.logits(&decoder.padded_hidden_states(&ids, &ids.ones_like()?)?)?.sqr()?.mean_all()?;
/// let mut gradients = Gradients::new();
/// gradients.accumulate(&loss, lora.parameters())?; // of the adapters only
/// assert_eq!(gradients.iter().count(), 14);
/// # Ok(())
/// # }
/// ```
///
/// A clone shares the variables.
#[derive(Debug, Clone)]
pub struct Lora {
    config: LoraConfig,
    parameters: Parameters,
}

impl Lora {
    /// Initializes new adapters. a is normal with variance `1 / (3 * inputs)`, which matches PEFT's
    /// uniform initialization, and b is zero. The same seed gives the same bits on every device.
    pub fn init(
        config: LoraConfig,
        model: &DecoderConfig,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let mut normal = StandardNormal::new(seed);
        let mut variables = BTreeMap::new();
        for (name, shape) in config.parameter_shapes(model)? {
            let values = if name.ends_with(LORA_A) {
                let (_, inputs) = shape.dims2()?;
                let std = (3.0 * inputs as f64).powf(-0.5);
                (0..shape.elem_count())
                    .map(|_| (normal.draw() * std) as f32)
                    .collect()
            } else {
                vec![0f32; shape.elem_count()]
            };
            variables.insert(name, Var::from_vec(values, shape, device)?);
        }
        Ok(Self {
            config: config.named(model),
            parameters: Parameters::unchecked(variables, device),
        })
    }

    /// The adapter options, with `all-linear` already expanded to names.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The trainable variables. They keep the base names, with `weight` replaced by `lora_A.weight`
    /// and `lora_B.weight`.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Copies the adapters to `device`. The copy is independent.
    pub fn copy_to(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            config: self.config.clone(),
            parameters: self.parameters.copy_to(device)?,
        })
    }

    /// Returns a builder with the adapter variables, which receive gradients, and the detached
    /// weights from `base`.
    pub fn var_builder(&self, base: &Parameters) -> Result<VarBuilder<'static>> {
        self.builder_with(
            base,
            DType::F32,
            |variable| Ok(variable.as_detached_tensor()),
            |variable| Ok(variable.as_tensor().clone()),
        )
    }

    /// Returns a builder of detached tensors, adapters included. They record no graph, and see
    /// updates.
    pub fn detached_var_builder(&self, base: &Parameters) -> Result<VarBuilder<'static>> {
        let detached = |variable: &Var| Ok(variable.as_detached_tensor());
        self.builder_with(base, DType::F32, detached, detached)
    }

    /// Like [`Parameters::copied_var_builder`] on `base`, with the adapters. Only the adapter
    /// copies are refreshed. A base that is already [frozen](Parameters::frozen_as) in `dtype` is
    /// shared.
    pub fn copied_var_builder(
        &self,
        base: &Parameters,
        dtype: DType,
    ) -> Result<(VarBuilder<'static>, ComputeCopies)> {
        let mut copies = ComputeCopies::default();
        let vb = self.builder_with(
            base,
            dtype,
            |variable| value_in(variable, dtype),
            |variable| copies.add(variable, dtype),
        )?;
        Ok((vb, copies))
    }

    fn builder_with(
        &self,
        base: &Parameters,
        dtype: DType,
        base_value: impl Fn(&Var) -> Result<Tensor>,
        mut adapter_value: impl FnMut(&Var) -> Result<Tensor>,
    ) -> Result<VarBuilder<'static>> {
        let mut tensors = base
            .iter()
            .map(|(name, variable)| Ok((name.to_owned(), base_value(variable)?)))
            .collect::<Result<HashMap<String, Tensor>>>()?;
        let scaling = Tensor::new(self.config.scaling(), &Device::Cpu)?;
        for module in self.modules() {
            extended(base, &format!("{module}weight"))?;
            tensors.insert(format!("{module}{LORA_SCALING}"), scaling.clone());
        }
        for (name, variable) in self.parameters.iter() {
            tensors.insert(name.to_owned(), adapter_value(variable)?);
        }
        Ok(builder(tensors, dtype, base.device()))
    }

    /// Returns a builder of detached tensors in `dtype` for a model without adapters, and the
    /// copies in which the adapters are merged into the weights that they extend. They see updates
    /// after [`MergedCopies::refresh`].
    ///
    /// A copy is dense, even if the weight is in quantized blocks. Other weights are shared, if
    /// they are in blocks or already [frozen](Parameters::frozen_as) in `dtype`.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16, the adapters belong to another model, or ranks divide
    /// [all weights](Parameters::is_full).
    pub fn merged_var_builder(
        &self,
        base: &Parameters,
        dtype: DType,
    ) -> Result<(VarBuilder<'static>, MergedCopies)> {
        ensure_copy_dtype(dtype)?;
        base.ensure_whole()?;
        let mut copies = BTreeMap::new();
        for module in self.modules() {
            let name = format!("{module}weight");
            let shape = shape(extended(base, &name)?)?;
            copies.insert(name, Var::zeros(shape, dtype, base.device())?);
        }
        let copies = MergedCopies::new(copies);
        copies.refresh(self, base)?;
        let tensors = base.iter().map(|(name, variable)| {
            let tensor = match copies.get(name) {
                Some(copy) => copy,
                None if variable.dtype() == dtype => variable.as_detached_tensor(),
                None => value_in(variable, dtype)?,
            };
            Ok((name.to_owned(), tensor))
        });
        let tensors = tensors.collect::<Result<_>>()?;
        Ok((builder(tensors, dtype, base.device()), copies))
    }

    /// Returns the weight `name` of `base` with its adapter, in f32 and new memory on the device of
    /// `base`.
    pub(crate) fn merged_weight(&self, name: &str, base: &Parameters) -> Result<Tensor> {
        let Some(matrices) = self.matrices(name) else {
            bail!("adapters: none for {name}, must have one");
        };
        let stored = extended(base, name)?.as_detached_tensor();
        // The numbers of blocks are new.
        let weight = match stored.dtype() {
            DType::U8 => numbers(&stored, DType::F32),
            _ => in_new_memory(&stored),
        };
        let merged = weight.and_then(|weight| self.merge(weight, matrices));
        merged.map_err(|error| Error::msg(format!("{name}: {error}")))
    }

    /// Adds `scaling * b a` to `weight`, which is f32 and in memory of its own.
    fn merge(&self, weight: Tensor, (a, b): (&Var, &Var)) -> Result<Tensor> {
        let [a, b] = [a, b].map(|x| x.as_detached_tensor().to_device(weight.device()));
        add_matmul(&weight, &(b? * self.config.scaling())?, &a?)?;
        Ok(weight)
    }

    /// Merges the adapters into the `base` weights in f32, for export to a file.
    pub fn export<'a>(&'a self, base: &'a Parameters) -> Export<'a> {
        let merge = |name: &str, weight: Tensor| match self.matrices(name) {
            Some(matrices) => self.merge(in_new_memory(&weight)?, matrices),
            None => Ok(weight),
        };
        Export::new(base).with_change(merge).in_dtype(DType::F32)
    }

    /// The names of the adapted maps, each with a dot at its end.
    fn modules(&self) -> impl Iterator<Item = &str> {
        let names = self.parameters.iter().map(|(name, _)| name);
        names.filter_map(|name| name.strip_suffix(LORA_A))
    }

    /// Returns whether this weight has an adapter.
    pub fn adapts(&self, weight: &str) -> bool {
        self.matrices(weight).is_some()
    }

    /// Returns A and B for this weight, if it has an adapter.
    fn matrices(&self, weight: &str) -> Option<(&Var, &Var)> {
        let module = weight.strip_suffix("weight")?;
        let matrix = |part| self.parameters.get(&format!("{module}{part}"));
        Some((matrix(LORA_A)?, matrix(LORA_B)?))
    }

    /// Returns new f32 parameters with the adapters merged into `base`.
    pub fn merged(&self, model: &DecoderConfig, base: &Parameters) -> Result<Parameters> {
        let merged = self.export(base);
        let tensors = merged
            .names()
            .map(|name| Ok((name.to_owned(), merged.tensor(name)?)));
        Parameters::from_tensors(model, tensors.collect::<Result<_>>()?, base.device())
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` to `folder` in PEFT's format.
    /// `base_model` is the base model's name or path.
    pub fn save(&self, folder: &Path, base_model: Option<&str>) -> Result<()> {
        let context = |error: Error| {
            Error::msg(format!(
                "cannot save adapters to {}: {error}",
                folder.display()
            ))
        };
        let config = PeftConfig::new(&self.config, base_model);
        let config = serde_json::to_vec_pretty(&config).map_err(Error::wrap)?;
        let tensors = self.parameters.iter().map(|(name, variable)| {
            LazyTensor::of(format!("{PREFIX}{name}"), variable.as_detached_tensor())
        });
        let tensors = tensors.collect();
        atomic_file::write(&folder.join(ADAPTER_CONFIG), &config)
            .map_err(Error::wrap)
            .and_then(|()| {
                safetensors_writer::write(&folder.join(ADAPTER_MODEL), tensors, || Ok(()))
            })
            .map_err(context)
    }

    /// Reads adapters saved by [`Self::save`] or PEFT, for a base with the configuration `model`.
    ///
    /// `lora_dropout` is ignored, since dropout is not supported.
    ///
    /// # Errors
    ///
    /// If `adapter_config.json` requires an unsupported computation, or names or shapes do not
    /// match.
    pub fn load(folder: &Path, model: &DecoderConfig, device: &Device) -> Result<Self> {
        let context = |error: Error| {
            Error::msg(format!(
                "cannot load adapters from {}: {error}",
                folder.display()
            ))
        };
        Self::read(folder, model, device).map_err(context)
    }

    fn read(folder: &Path, model: &DecoderConfig, device: &Device) -> Result<Self> {
        let config = std::fs::read(folder.join(ADAPTER_CONFIG)).map_err(Error::wrap)?;
        let config = PeftConfig::parse(&config)?.lora(all_linear)?;
        let shapes = config.parameter_shapes(model)?;
        let file = folder.join(ADAPTER_MODEL);
        let tensors: HashMap<String, Tensor> = candle_core::safetensors::load(file, &Device::Cpu)?
            .into_iter()
            .map(|(name, tensor)| match name.strip_prefix(PREFIX) {
                Some(own) => (own.to_owned(), tensor),
                None => (name, tensor),
            })
            .collect();
        check_names(ADAPTER_MODEL, &shapes, &tensors)?;
        let mut variables = BTreeMap::new();
        for (name, shape) in shapes {
            let tensor = &tensors[&name];
            if tensor.shape() != &shape || !tensor.dtype().is_float() {
                bail!(
                    "{name}: {:?} of {:?}, must be {:?} of a floating-point type",
                    tensor.dims(),
                    tensor.dtype(),
                    shape.dims()
                );
            }
            let tensor = tensor
                .to_device(device)?
                .to_dtype(candle_core::DType::F32)?
                .contiguous()?;
            variables.insert(name, Var::from_tensor(&tensor)?);
        }
        Ok(Self {
            config: config.named(model),
            parameters: Parameters::unchecked(variables, device),
        })
    }
}
