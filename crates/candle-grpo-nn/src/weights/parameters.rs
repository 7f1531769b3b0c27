//! Trainable variables by name.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::Collective;
use candle_grpo_kernels::arithmetic_dtype;
use candle_nn::VarBuilder;

use crate::config::architecture::{Initial, Parameter};
use crate::weights::Export;
use crate::weights::base_weights::{FrozenForm, builder, check_shape, shape};
use crate::weights::check::{
    check_finite, check_headers, check_names, reduce_to_parameters, text_model,
};
use crate::weights::divided_weights::{DividedWeights, Request};
use crate::weights::masters::{Masters, WeightDivision};
use crate::weights::safetensors;
use crate::weights::shard::Shard;
use crate::weights::standard_normal::StandardNormal;
use crate::weights::stored_tensor::{StoredTensor, Values};
use crate::{BaseWeights, ComputeCopies, DecoderConfig};

/// Standard deviation for new weights, as in GPT-2 and Hugging Face's `initializer_range`.
pub(crate) const INIT_STD: f64 = 0.02;

/// A model's trainable variables by name, in sorted order.
///
/// Those of a decoder have the names and shapes of [`DecoderConfig::parameter_shapes`];
/// [`Self::with`] adds others. The variables are f32, as smaller types lose small updates, or f64
/// or bf16 by [`Self::to_dtype`]. [Frozen](Self::frozen_as) ones may also be f16 or blocks of
/// quantized numbers (u8 `[outputs, blocks of a row, bytes of a block]`). A clone shares the
/// variables.
#[derive(Debug, Clone)]
pub struct Parameters {
    variables: BTreeMap<String, Var>,
    masters: Option<Masters>,
    device: Device,
}

impl Parameters {
    /// Creates parameters without variables, for a model whose weights are not read.
    pub fn empty() -> Self {
        Self::unchecked(BTreeMap::new(), &Device::Cpu)
    }

    /// Creates parameters without variables, for weights that are [inserted](Self::insert) one
    /// after the other. Ranks divide them if a `division` is given.
    pub(crate) fn to_fill(division: Option<&WeightDivision>, device: &Device) -> Self {
        let division = division.filter(|division| division.divides_on(device));
        Self {
            masters: division.map(Masters::new),
            ..Self::unchecked(BTreeMap::new(), device)
        }
    }

    fn insert(&mut self, name: String, weight: &Tensor) -> Result<()> {
        let variable = match &mut self.masters {
            None => Var::from_tensor(weight)?,
            Some(masters) => masters.divide(&name, weight)?,
        };
        self.variables.insert(name, variable);
        Ok(())
    }

    /// Inserts a weight in `form`.
    ///
    /// # Errors
    ///
    /// If it has another shape, or is neither a floating-point tensor nor quantized.
    pub(crate) fn insert_in(
        &mut self,
        form: &FrozenForm,
        name: String,
        tensor: &Tensor,
        shape: &Shape,
    ) -> Result<()> {
        check_shape(&name, tensor, shape)?;
        if !tensor.dtype().is_float() && tensor.dtype() != DType::U8 {
            bail!(
                "tensor {name}: dtype {:?}, must be a floating-point type",
                tensor.dtype()
            );
        }
        // Detached, so that a variable passed here is copied, not shared.
        let tensor = form.of(&name, &tensor.detach().to_device(&self.device)?)?;
        self.insert(name, &tensor)
    }

    /// Inserts a weight in `form` that `values` has. Where ranks divide all weights, only this
    /// rank's part is read.
    ///
    /// # Errors
    ///
    /// Same as [`Self::insert_in`]. Also if `read` fails, or a number that is read is not finite.
    fn insert_from<T: Values>(
        &mut self,
        form: &FrozenForm,
        name: String,
        (values, shape): (T, &Shape),
        read: impl Fn(T) -> Result<Tensor>,
    ) -> Result<()> {
        let masters = self.masters.as_mut();
        let Some(masters) = masters.filter(|masters| masters.weights().is_some()) else {
            return self.insert_in(form, name, &read(values)?, shape);
        };
        let dtype = values.dtype()?;
        if values.dims() != shape.dims() || !dtype.is_float() {
            bail!(
                "tensor {name}: {:?} of {dtype:?}, must be {:?} of a floating-point type",
                values.dims(),
                shape.dims()
            );
        }
        let part = |range| {
            let part = values.read_elements(range)?;
            check_finite(&part)?;
            part.to_dtype(form.dtype)
        };
        let variable = masters
            .divide_read(&name, (shape, &self.device), part)
            .map_err(|error| Error::msg(format!("tensor {name}: {error}")))?;
        self.variables.insert(name, variable);
        Ok(())
    }

    /// Initializes new weights: normal with standard deviation 0.02, norm factors 1, and biases 0.
    /// In gated delta rule gates, `dt_bias` is 1, and the rates `exp(A_log)` are evenly spaced
    /// between 0 and 16.
    ///
    /// Projections that write to the residual stream (`o_proj`, `out_proj`, `down_proj`) are scaled
    /// by `1 / sqrt(2 * num_hidden_layers)`, so that its variance does not grow with depth (GPT-2,
    /// section 2.3). The same seed gives the same bits on every device.
    pub fn init(config: &DecoderConfig, seed: u64, device: &Device) -> Result<Self> {
        config.validate()?;
        let residual = 1.0 / (2.0 * config.num_hidden_layers as f64).sqrt();
        let mut normal = StandardNormal::new(seed);
        let mut variables = BTreeMap::new();
        for (name, Parameter { shape, initial }) in config.architecture().parameters(config) {
            let mut draw = |std: f64| {
                (0..shape.elem_count())
                    .map(|_| (normal.draw() * std) as f32)
                    .collect()
            };
            let values = match initial {
                Initial::Zeros | Initial::OneLess => vec![0f32; shape.elem_count()],
                Initial::Ones => vec![1f32; shape.elem_count()],
                Initial::Rates => {
                    let count = shape.elem_count();
                    let rate = |at| 16.0 * (at as f64 + 0.5) / count as f64;
                    (0..count).map(|at| rate(at).ln() as f32).collect()
                }
                Initial::Normal => draw(INIT_STD),
                Initial::Residual => draw(INIT_STD * residual),
            };
            variables.insert(name, Var::from_vec(values, shape, device)?);
        }
        Ok(Self::unchecked(variables, device))
    }

    /// Copies tensors in any floating-point dtype to f32 variables on `device`.
    ///
    /// # Errors
    ///
    /// If `tensors` does not have exactly the names and shapes in
    /// [`DecoderConfig::parameter_shapes`]. The error names what is missing, surplus or has a
    /// different shape.
    pub fn from_tensors(
        config: &DecoderConfig,
        tensors: HashMap<String, Tensor>,
        device: &Device,
    ) -> Result<Self> {
        let form = FrozenForm::new(config, BaseWeights::Dense, DType::F32)?;
        Self::to_fill(None, device).filled(config, tensors, Ok, &form)
    }

    /// Inserts all weights of a model in `form`. Each tensor is freed before the next is read, so a
    /// large model is never held twice.
    fn filled<T: Values>(
        mut self,
        config: &DecoderConfig,
        mut tensors: HashMap<String, T>,
        read: impl Fn(T) -> Result<Tensor>,
        form: &FrozenForm,
    ) -> Result<Self> {
        config.validate()?;
        let shapes = config.parameter_shapes();
        check_names("tensors", &shapes, &tensors)?;
        for (name, shape) in shapes {
            let Some(tensor) = tensors.remove(&name) else {
                bail!("tensors: no {name}")
            };
            self.insert_from(form, name, (tensor, &shape), &read)?;
        }
        Ok(self)
    }

    /// Shares a custom model's variables, for example from Candle's `VarMap`.
    ///
    /// # Errors
    ///
    /// If there are no variables, one is not on `device`, or they are neither all f32 nor all f64.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_grpo_nn::Parameters;
    /// use candle_nn::{VarBuilder, VarMap};
    ///
    /// let variables = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    /// let _model = candle_nn::linear(3, 2, vb.pp("output"))?;
    /// let variables = variables.data().lock().expect("no other thread").clone();
    /// let parameters = Parameters::from_variables(variables, &Device::Cpu)?;
    /// assert!(parameters.get("output.weight").is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn from_variables(
        variables: impl IntoIterator<Item = (String, Var)>,
        device: &Device,
    ) -> Result<Self> {
        let variables: BTreeMap<String, Var> = variables.into_iter().collect();
        let Some(first) = variables.values().next() else {
            bail!("variables: none, must have at least one");
        };
        let dtype = arithmetic_dtype(first.dtype());
        for (name, variable) in &variables {
            if variable.dtype() != dtype || !variable.device().same_device(device) {
                bail!(
                    "variable {name}: {:?} on {:?}, must be {dtype:?} on {:?}",
                    variable.dtype(),
                    variable.device().location(),
                    device.location()
                );
            }
        }
        Ok(Self::unchecked(variables, device))
    }

    /// Wraps variables that need no checks.
    pub(crate) fn unchecked(variables: BTreeMap<String, Var>, device: &Device) -> Self {
        Self {
            variables,
            masters: None,
            device: device.clone(),
        }
    }

    /// Adds a variable, such as a critic's head, initialized with a copy of `values` in f32, or in
    /// f64 if the other variables are f64.
    ///
    /// # Errors
    ///
    /// If a variable with that name exists.
    pub fn with(mut self, name: &str, values: &Tensor) -> Result<Self> {
        if self.variables.contains_key(name) {
            bail!("{name}: a variable of that name exists, must be a new name");
        }
        let values = values
            .detach()
            .to_device(&self.device)?
            .to_dtype(arithmetic_dtype(self.dtype()))?
            .contiguous()?;
        self.variables
            .insert(name.to_owned(), Var::from_tensor(&values)?);
        Ok(self)
    }

    /// Reads one safetensors file.
    ///
    /// Rotary frequencies (`rotary_emb.inv_freq`) are ignored. So is the output layer of a model
    /// with tied embeddings, if it equals the embedding.
    ///
    /// # Errors
    ///
    /// Same as [`Self::from_tensors`]. Also if a value is not finite.
    pub fn load(config: &DecoderConfig, path: &Path, device: &Device) -> Result<Self> {
        let context = |error: Error| {
            Error::msg(format!(
                "cannot load parameters from {}: {error}",
                path.display()
            ))
        };
        let load = || {
            let form = FrozenForm::new(config, BaseWeights::Dense, DType::F32)?;
            let tensors = StoredTensor::read_file(path)?;
            Self::to_fill(None, device).filled_from(config, tensors, &form)
        };
        load().map_err(context)
    }

    /// Reads the weights in a Hugging Face folder: `model.safetensors`, or the files that
    /// `model.safetensors.index.json` lists.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`].
    pub fn load_folder(config: &DecoderConfig, folder: &Path, device: &Device) -> Result<Self> {
        Self::load_folder_frozen(config, folder, BaseWeights::Dense, DType::F32, device)
    }

    /// Like [`Self::load_folder`], for frozen weights as in [`Self::frozen_as`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_folder`] and [`Self::frozen_as`].
    pub fn load_folder_frozen(
        config: &DecoderConfig,
        folder: &Path,
        base: BaseWeights,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::to_fill(None, device).filled_from_folder(config, folder, (base, dtype))
    }

    /// Like [`Self::load_folder`], for weights that ranks divide: the variables are in the dtype of
    /// the `division`, and each rank keeps its part of the f32 weights, as after
    /// [`AdamWConfig::divide`](crate::AdamWConfig::divide). A weight is freed before the next one
    /// is read, so a rank never has all of them in f32. With
    /// [`Sharding::Full`](crate::optim::Sharding::Full), a rank reads only its part of each weight.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_folder`].
    pub fn load_folder_divided(
        config: &DecoderConfig,
        folder: &Path,
        division: &WeightDivision,
        device: &Device,
    ) -> Result<Self> {
        let parameters = Self::to_fill(Some(division), device);
        parameters.filled_from_folder(config, folder, (BaseWeights::Dense, DType::F32))
    }

    fn filled_from_folder(
        self,
        config: &DecoderConfig,
        folder: &Path,
        (base, dtype): (BaseWeights, DType),
    ) -> Result<Self> {
        let load = || {
            let form = FrozenForm::new(config, base, dtype)?;
            let tensors = safetensors::read_folder(folder, StoredTensor::read_file)?;
            self.filled_from(config, tensors, &form)
        };
        load().map_err(|error| {
            Error::msg(format!(
                "cannot load parameters from {}: {error}",
                folder.display()
            ))
        })
    }

    /// Inserts a checkpoint's weights. Each tensor is read, converted and freed in turn.
    pub(crate) fn filled_from(
        self,
        config: &DecoderConfig,
        mut tensors: HashMap<String, StoredTensor>,
        form: &FrozenForm,
    ) -> Result<Self> {
        reduce_to_parameters(config, &mut tensors)?;
        self.filled(config, tensors, |tensor| tensor.read(), form)
    }

    /// Freezes the weights of `model` to train adapters on them: linear maps in the form `base`,
    /// all others in `dtype`. In bf16 and f16, a value takes 2 bytes.
    ///
    /// Weights that are already in quantized blocks stay that way. Each variable is freed once
    /// converted, unless a clone shares it. Builders from the result in `dtype` share its memory.
    /// [`AdamW`](crate::AdamW) rejects these weights, except in f32.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16, or ranks [divide](Self::is_divided) the weights, unless
    /// they do so in this form.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_grpo_nn::{BaseWeights, DecoderConfig, Parameters};
    ///
    /// let model = DecoderConfig { vocab_size: 11, hidden_size: 32, intermediate_size: 64,
    ///     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    ///     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
    /// let base = Parameters::init(&model, 7, &Device::Cpu)?;
    /// let base = base.frozen_as(&model, BaseWeights::Q8_0, DType::BF16)?;
    /// let dims = |name: &str| base.get(name).map(|weight| weight.dims().to_vec());
    /// // Blocks of 32 numbers have 34 bytes.
    /// assert_eq!(dims("model.layers.0.mlp.down_proj.weight"), Some(vec![32, 2, 34]));
    /// assert_eq!(dims("model.embed_tokens.weight"), Some(vec![11, 32]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn frozen_as(
        mut self,
        model: &DecoderConfig,
        base: BaseWeights,
        dtype: DType,
    ) -> Result<Self> {
        let form = FrozenForm::new(model, base, dtype)?;
        let stays_dense = matches!(base, BaseWeights::Dense | BaseWeights::Stored);
        if self.is_full() && self.dtype() == dtype && stays_dense {
            return Ok(self);
        }
        if self.has_whole_masters() {
            bail!("weights: f32 copies in host memory, must have none to be frozen");
        }
        if self.is_divided() {
            bail!("weights: divided between ranks, must be whole to be frozen");
        }
        for (name, variable) in &mut self.variables {
            let weight = form.of(name, &variable.as_detached_tensor())?;
            if weight.dtype() != variable.dtype() {
                *variable = Var::from_tensor(&weight)?;
            }
        }
        Ok(self)
    }

    /// Divides weights between ranks. Each is freed once it is divided, unless a clone shares it.
    ///
    /// # Errors
    ///
    /// If a weight is quantized, or not f32 where the ranks divide f32 weights.
    pub fn divided(self, division: &WeightDivision) -> Result<Self> {
        let mut divided = Self::to_fill(Some(division), &self.device);
        for (name, variable) in self.variables {
            divided.insert(name, &variable.as_detached_tensor())?;
        }
        Ok(divided)
    }

    /// Divides a copy of the weights of the decoder `config` between ranks. Each weight is read
    /// [from all ranks](Self::whole) if it is divided already, so all of them must call it
    /// together.
    ///
    /// # Errors
    ///
    /// If there is no weight of a name, or another rank has ended.
    pub fn copy_divided(&self, config: &DecoderConfig, division: &WeightDivision) -> Result<Self> {
        let mut copy = Self::to_fill(Some(division), &self.device);
        for name in config.parameter_shapes().into_keys() {
            let weight = self.whole(&name)?;
            copy.insert(name, &weight)?;
        }
        Ok(copy)
    }

    /// Returns whether ranks [divide](crate::AdamWConfig::divide) the weights: those in f32, those
    /// that models compute with, or both. Also if those in f32 are [in host
    /// memory](crate::optim::StateMemory::Host) beside those that models compute with.
    pub fn is_divided(&self) -> bool {
        self.masters.is_some()
    }

    /// Returns whether ranks divide the weights that models compute with
    /// ([`Sharding::Full`](crate::optim::Sharding::Full)). The variables then have no values,
    /// except while a model [holds](crate::DividedModel) them: read them with [`Self::whole`].
    pub fn is_full(&self) -> bool {
        self.divided_weights().is_some()
    }

    /// The weights that models compute with, if ranks divide these.
    pub(crate) fn divided_weights(&self) -> Option<&Arc<DividedWeights>> {
        self.masters.as_ref()?.weights()
    }

    /// This rank's part of the weight that models compute with, if ranks divide it.
    pub(crate) fn own(&self, name: &str) -> Option<Var> {
        self.masters.as_ref()?.own(name)
    }

    /// The collective of the ranks that divide the weights.
    pub fn collective(&self) -> Option<&Arc<dyn Collective>> {
        self.shard().map(|shard| &shard.collective)
    }

    /// The dtype of [whole](Self::whole) weights.
    pub(crate) fn whole_dtype(&self) -> DType {
        let masters = self.masters.as_ref();
        masters.map_or_else(|| self.dtype(), Masters::dtype)
    }

    /// Checks that the variable of this name has values.
    pub(crate) fn ensure_held(&self, name: &str) -> Result<()> {
        match self.divided_weights() {
            Some(weights) if !weights.is_held(name) => {
                bail!("{name}: divided between ranks, must be held to be exported by one of them")
            }
            _ => Ok(()),
        }
    }

    /// Checks that the variables have values.
    pub(crate) fn ensure_whole(&self) -> Result<()> {
        if self.is_full() {
            bail!("weights: divided between ranks, must be whole to be copied");
        }
        Ok(())
    }

    /// The division of the weights between ranks, if they are divided.
    pub(crate) fn shard(&self) -> Option<&Shard> {
        let masters = self.masters.as_ref().filter(|masters| masters.has_ranks());
        masters.map(Masters::shard)
    }

    /// Returns whether this process has all f32 weights apart from the variables, in host memory.
    pub(crate) fn has_whole_masters(&self) -> bool {
        self.is_divided() && self.shard().is_none()
    }

    /// The f32 weight of this name, if it is apart from the variable: this rank's part, if ranks
    /// divide it.
    pub(crate) fn master(&self, name: &str) -> Option<&Var> {
        self.masters.as_ref()?.kept(name)
    }

    /// Returns the weight of this name, in f32 if ranks divide it in f32; from all ranks, if they
    /// divide it. Only rank 0 calls it, while the others [take part](Self::take_part_in_export).
    pub(crate) fn gathered(&self, name: &str) -> Result<Option<Tensor>> {
        let (Some(masters), Some(variable)) = (&self.masters, self.variables.get(name)) else {
            return Ok(None);
        };
        let rank = masters.shard().collective.rank();
        if rank != 0 {
            bail!("weights: gathered by rank {rank}, must be by rank 0");
        }
        let index = self.variables.keys().position(|other| other == name);
        let request = index.map_or(Request::End, Request::Export);
        request.exchange(masters.shard())?;
        masters.gather(name, variable).map(Some)
    }

    /// Returns the weight of this name, in f32 if ranks [divide](crate::AdamWConfig::divide) it in
    /// f32. If they divide it, all ranks must call it together, unlike an
    /// [export](Export::with_masters). An f32 weight in host memory stays there.
    ///
    /// # Errors
    ///
    /// If there is no weight of this name, or another rank has ended.
    pub fn whole(&self, name: &str) -> Result<Tensor> {
        let Some(variable) = self.variables.get(name) else {
            bail!("parameters: no {name}, must have it");
        };
        match &self.masters {
            Some(masters) => masters.gather(name, variable),
            None => Ok(variable.as_detached_tensor()),
        }
    }

    /// Lets rank 0 export weights, and make passes of models over them, alone: it asks for each of
    /// them until it [ends](Self::end_exports) the exports, while all other ranks
    /// [take part](Self::take_part_in_export). Does nothing unless ranks divide
    /// [all weights](Self::is_full).
    pub fn begin_requests(&self) {
        if let Some(weights) = self.divided_weights() {
            weights.set_asks(true);
        }
    }

    /// Returns whether rank 0 [asks](Self::begin_requests) for weights that ranks divide.
    pub(crate) fn asks(&self) -> bool {
        let weights = self.divided_weights();
        weights.is_some_and(|weights| weights.asks())
    }

    /// Returns whether rank 0 must [ask](Self::begin_requests) for weights: ranks divide
    /// [all of them](Self::is_full), and they are not held.
    pub fn needs_requests(&self) -> bool {
        let weights = self.divided_weights();
        weights.is_some_and(|weights| !weights.are_held())
    }

    /// Ends the exports [with masters](Export::with_masters) that the other ranks take part in.
    /// Only rank 0 calls it. Does nothing unless ranks divide the weights.
    ///
    /// # Errors
    ///
    /// If another rank has ended.
    pub fn end_exports(&self) -> Result<()> {
        if let Some(weights) = self.divided_weights() {
            weights.set_asks(false);
        }
        match &self.masters {
            Some(masters) => Request::End.exchange(masters.shard()).map(drop),
            None => Ok(()),
        }
    }

    /// Takes part while rank 0 exports the weights [with masters](Export::with_masters), until it
    /// [ends](Self::end_exports) the exports. Does nothing unless ranks divide the weights.
    ///
    /// # Errors
    ///
    /// If another rank has ended.
    pub fn take_part_in_export(&self) -> Result<()> {
        let Some(masters) = &self.masters else {
            return Ok(());
        };
        loop {
            let index = match Request::End.exchange(masters.shard())? {
                Request::End => return Ok(()),
                Request::Gather(count) => {
                    match masters.weights() {
                        Some(weights) => weights.answer(count)?,
                        None => bail!("weights: rank 0 gathers {count}, must divide them"),
                    }
                    continue;
                }
                Request::Export(index) => index,
            };
            let Some((name, variable)) = self.variables.iter().nth(index) else {
                bail!("weights: rank 0 exports number {index}, must be one of the parameters");
            };
            masters.gather(name, variable)?;
        }
    }

    /// Checks the weight names, shapes and types in a Hugging Face folder, and its file lengths,
    /// without reading the weights.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_folder`], except for values that are not finite.
    pub fn check_folder(config: &DecoderConfig, folder: &Path) -> Result<()> {
        safetensors::read_folder(folder, safetensors::read_header)
            .and_then(|headers| check_headers(config, headers))
            .map_err(|error| {
                Error::msg(format!(
                    "cannot load parameters from {}: {error}",
                    folder.display()
                ))
            })
    }

    /// Writes one safetensors file that you can load with [`Self::load`] or Hugging Face
    /// transformers. See [`Export`] for other dtypes and merged adapters, and
    /// [`Export::with_masters`] for the f32 weights that ranks [divide](Self::is_divided): without
    /// it, the file has the rounded ones.
    ///
    /// The file is written [atomically](crate::atomic_file).
    pub fn save(&self, path: &Path) -> Result<()> {
        Export::new(self).save(path)
    }

    /// Returns a builder with the variables themselves, which receive gradients.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        self.builder_with(|variable| variable.as_tensor().clone())
    }

    /// Returns a builder with detached tensors, which record no graph. They share memory with the
    /// variables and see updates.
    pub fn detached_var_builder(&self) -> VarBuilder<'static> {
        self.builder_with(Var::as_detached_tensor)
    }

    /// Returns a builder with detached copies in f32, bf16 or f16, which see updates after
    /// [`ComputeCopies::refresh`].
    pub fn copied_var_builder(&self, dtype: DType) -> Result<(VarBuilder<'static>, ComputeCopies)> {
        let mut copies = ComputeCopies::default();
        let tensors = self
            .variables
            .iter()
            .map(|(name, variable)| Ok((name.clone(), copies.add(variable, dtype)?)))
            .collect::<Result<HashMap<_, _>>>()?;
        Ok((builder(tensors, dtype, &self.device), copies))
    }

    /// Copies the values. Later updates do not change the copy.
    ///
    /// # Errors
    ///
    /// If ranks divide [all weights](Self::is_full).
    pub fn frozen_copy(&self) -> Result<HashMap<String, Tensor>> {
        self.ensure_whole()?;
        self.variables
            .iter()
            .map(|(name, variable)| Ok((name.clone(), variable.as_detached_tensor().copy()?)))
            .collect()
    }

    /// Copies the variables to `device`. The copies are independent. If ranks
    /// [divide](Self::is_divided) the f32 weights, only the rounded ones are copied.
    ///
    /// # Errors
    ///
    /// If ranks divide [all weights](Self::is_full).
    pub fn copy_to(&self, device: &Device) -> Result<Self> {
        self.ensure_whole()?;
        let variables = self
            .variables
            .iter()
            .map(|(name, variable)| {
                let value = variable.as_detached_tensor().to_device(device)?;
                Ok((name.clone(), Var::from_tensor(&value)?))
            })
            .collect::<Result<BTreeMap<_, _>>>()?;
        Ok(Self::unchecked(variables, device))
    }

    /// Independent variables with the same values in `dtype`: F64, to train in double precision,
    /// F32, BF16, to train with [`MasterWeights::Bf16`](crate::optim::MasterWeights::Bf16), or F16,
    /// for a model that does not train.
    /// Decoders follow the dtype. Gradients and the state of [`AdamW`](crate::AdamW) do, too,
    /// but are f32 beside bf16.
    ///
    /// Files are read as f32; [`Self::set_values`] restores values in f64.
    ///
    /// # Errors
    ///
    /// If `dtype` is any other, a variable is quantized, or ranks divide
    /// [all weights](Self::is_full).
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_grpo_nn::{AdamW, AdamWConfig, DecoderConfig, Gradients, Parameters};
    ///
    /// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
    /// let parameters = Parameters::init(&model, 7, &Device::Cpu)?.to_dtype(DType::F64)?;
    /// let mut gradients = Gradients::new();
    /// for (name, variable) in parameters.iter() {
    ///     gradients.add(name, &variable.ones_like()?)?;
    /// }
    /// AdamW::new(AdamWConfig::default(), &parameters)?.step(&parameters, &gradients)?;
    /// // The first step is the learning rate, divided by 1 + epsilon.
    /// let norm = parameters.get("model.norm.weight").expect("every model has one");
    /// let moved = 1.0 - norm.to_vec1::<f64>()?[0];
    /// assert!((moved - 1e-3 / (1.0 + 1e-8)).abs() < 1e-15);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16) {
            bail!("dtype: {dtype:?}, must be F32, F64, BF16 or F16");
        }
        self.ensure_whole()?;
        let variables = self
            .variables
            .iter()
            .map(|(name, variable)| {
                if variable.dtype() == DType::U8 {
                    bail!("{name}: blocks of quantized numbers, must be dense");
                }
                let value = if self.has_whole_masters() && variable.dtype() != dtype {
                    self.whole(name)?.to_device(&self.device)?
                } else {
                    variable.as_detached_tensor()
                };
                Ok((name.clone(), Var::from_tensor(&value.to_dtype(dtype)?)?))
            })
            .collect::<Result<BTreeMap<_, _>>>()?;
        Ok(Self::unchecked(variables, &self.device))
    }

    /// Copies `values`, in any floating-point dtype, into the variables in place. Decoders that
    /// share them see the change.
    ///
    /// # Errors
    ///
    /// If names or shapes do not match. In that case nothing has changed.
    pub fn set_values(&self, values: &HashMap<String, Tensor>) -> Result<()> {
        self.set(values)
    }

    /// Like [`Self::set_values`], with the values in a safetensors file, which are read one by one.
    /// The file may have the names of a checkpoint that is more than the text model `config`.
    ///
    /// # Errors
    ///
    /// Same as [`Self::set_values`]. Also if the file cannot be read; then some values may have
    /// changed.
    pub fn set_values_from(&self, path: &Path, config: Option<&DecoderConfig>) -> Result<()> {
        let set = |values| match config {
            Some(config) => self.set(&text_model(config, values)),
            None => self.set(&values),
        };
        StoredTensor::read_file(path).and_then(set)
    }

    fn set<T: Values>(&self, values: &HashMap<String, T>) -> Result<()> {
        let expected = self.variables.iter();
        let expected = expected.map(|(name, variable)| (name.clone(), variable.shape().clone()));
        check_names("values", &expected.collect(), values)?;
        for (name, variable) in &self.variables {
            let value = &values[name];
            let dtype = value.dtype()?;
            if value.dims() != variable.dims() || !dtype.is_float() {
                bail!(
                    "values: {name}: {:?} of {dtype:?}, must be {:?} of a floating-point type",
                    value.dims(),
                    variable.dims()
                );
            }
        }
        if let Some(weights) = self.divided_weights() {
            weights.ensure_free()?;
        }
        for (name, variable) in &self.variables {
            let elements = variable.elem_count();
            let (own, shard) = (self.own(name), self.shard());
            if let (Some(own), Some(shard)) = (own, shard) {
                let part = shard.read(elements, |range| values[name].read_elements(range))?;
                for kept in [Some(&own), self.master(name)].into_iter().flatten() {
                    copy_into(kept, &part)?;
                }
                continue;
            }
            let value = values[name].read_elements(0..elements)?;
            copy_into(variable, &value.reshape(variable.shape())?)?;
            if let (Some(kept), Some(masters)) = (self.master(name), &self.masters) {
                copy_into(kept, &masters.shard().keep(&value, elements)?)?;
            }
        }
        Ok(())
    }

    /// Names and variables, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables
            .iter()
            .map(|(name, variable)| (name.as_str(), variable))
    }

    /// Names and the numbers that this rank keeps of each variable, sorted by name: its part, as a
    /// vector, if ranks divide [all weights](Self::is_full), and otherwise the variable.
    pub fn kept(&self) -> impl Iterator<Item = (&str, Tensor)> {
        self.iter().map(|(name, variable)| {
            let master = || self.master(name).cloned();
            let part = self.own(name).map(|own| master().unwrap_or(own));
            (name, part.as_ref().unwrap_or(variable).as_detached_tensor())
        })
    }

    /// The variable with this name.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.variables.get(name)
    }

    /// Number of variables.
    pub fn len(&self) -> usize {
        self.variables.len()
    }

    /// Returns whether there are no variables.
    pub fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// Total number of elements, including those in quantized blocks.
    pub fn num_elements(&self) -> usize {
        let elements = |variable: &Var| shape(variable).map_or(0, |shape| shape.elem_count());
        self.variables.values().map(elements).sum()
    }

    /// Total size of the variables in bytes. If ranks divide [all weights](Self::is_full), these
    /// are the bytes of this rank's part.
    pub fn num_bytes(&self) -> usize {
        let bytes = |variable: &Var| variable.elem_count() * variable.dtype().size_in_bytes();
        let whole = self.variables.iter();
        let whole = whole.filter(|(name, _)| self.own(name).is_none());
        let own = self
            .divided_weights()
            .map_or(0, |weights| weights.num_bytes());
        whole.map(|(_, variable)| bytes(variable)).sum::<usize>() + own
    }

    /// The variables' dtype, except for quantized blocks: F32 or F64, unless they are
    /// [frozen](Self::frozen_as).
    pub fn dtype(&self) -> DType {
        let mut variables = self.variables.values();
        let first = variables.find(|variable| variable.dtype() != DType::U8);
        first.map_or(DType::F32, |variable| variable.dtype())
    }

    /// The device that holds the variables.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn builder_with(&self, tensor_of: impl Fn(&Var) -> Tensor) -> VarBuilder<'static> {
        let tensors = self
            .variables
            .iter()
            .map(|(name, variable)| (name.clone(), tensor_of(variable)))
            .collect();
        // Not a VarMap, which would create a random tensor for an unknown name.
        builder(tensors, self.dtype(), &self.device)
    }
}

/// Copies `value` into `variable`. It must have the same shape, but can have any floating-point
/// dtype and device.
pub(crate) fn copy_into(variable: &Var, value: &Tensor) -> Result<()> {
    let value = value.detach().to_device(variable.device())?;
    variable.set(&value.to_dtype(variable.dtype())?.contiguous()?)
}
