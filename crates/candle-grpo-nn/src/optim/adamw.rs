//! The AdamW optimizer.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_core::validate::{self, Name};
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, NUMBERS_IN_BLOCK, Rounding, adamw, arithmetic_dtype, moment_blocks,
};
use serde::{Deserialize, Serialize};

use super::gradients::beside;
use super::reduction::Sums;
use super::{GradientDType, Sharding};
use crate::weights::check::check_names;
use crate::weights::parameters::copy_into;
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::weights::shard::Shard;
use crate::weights::stored_tensor::{StoredTensor, Values};
use crate::{ComputeCopies, Gradients, Parameters, WeightDivision};

/// Options for [`AdamW`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate. For reinforcement learning on a pretrained model, start around 1e-6.
    pub learning_rate: f64,
    /// Decay rate for the gradient mean, in [0, 1). Default 0.9.
    pub beta1: f64,
    /// Decay rate for the squared gradient mean, in [0, 1). Default 0.999.
    pub beta2: f64,
    /// Added to the denominator for numerical stability. Default 1e-8.
    pub epsilon: f64,
    /// Decoupled weight decay: each step multiplies a parameter by `1 - learning_rate *
    /// weight_decay`, as in PyTorch. Default 0.01.
    pub weight_decay: f64,
    /// Parameters that decay: `matrices` (in linear layers) or `all`.
    pub decay: DecayRule,
    /// State storage in memory: `f32`, or `8bit` (blocks with a shared scale).
    pub state: StateForm,
    /// The dtype of the weights that the steps add up in: `f32`, or `bf16` with stochastic
    /// rounding.
    pub master_weights: MasterWeights,
    /// The dtype of the gradient sums of the matrices in a decoder's layers: `f32`, or `bf16`. A
    /// trainer sums in it, see [`Gradients::with_dtype`].
    pub gradient_dtype: GradientDType,
    /// The memory with the state, and with the f32 weights beside bf16 or f16: that of the
    /// `device`, or of the `host`, whose CPU then makes the steps.
    pub memory: StateMemory,
}

impl AdamWConfig {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Names the first invalid option.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("learning_rate", self.learning_rate),
            ("epsilon", self.epsilon),
            ("weight_decay", self.weight_decay),
        ] {
            validate::non_negative(name, value)?;
        }
        for (name, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            let valid = (0.0..1.0).contains(&value);
            validate::check(valid, name, value, "be at least 0 and below 1")?;
        }
        Ok(())
    }
}

impl Default for AdamWConfig {
    /// PyTorch's values, with a learning rate of 1e-3. Only matrices decay.
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            decay: DecayRule::default(),
            state: StateForm::default(),
            master_weights: MasterWeights::default(),
            gradient_dtype: GradientDType::default(),
            memory: StateMemory::default(),
        }
    }
}

impl AdamWConfig {
    /// Divides weights that train with these options between the ranks in `collective`, as
    /// `sharding` says. The variables are then in `dtype`. Each weight is freed once it is divided,
    /// unless a clone shares it.
    ///
    /// On a GPU with [`StateMemory::Host`], f32 weights beside variables in bf16 or f16 are on the
    /// CPU, also with one rank: all of them, if ranks do not divide them.
    ///
    /// - [`Sharding::Resident`]: `dtype` is bf16 or f16, and beside the variables each rank keeps
    ///   its part of the f32 weights, which [`AdamW`] updates. Weights stay as they are for an f32
    ///   `dtype`, or with [`MasterWeights::Bf16`].
    /// - [`Sharding::Full`]: each rank keeps its part of the variables, too, which have values only
    ///   while a model [holds](crate::DividedModel) them.
    ///
    /// With one rank otherwise, or if they are divided already, the weights stay as they are.
    ///
    /// # Errors
    ///
    /// If a weight is not f32 beside f32 masters, or if the weights are divided in another dtype.
    pub fn divide(
        &self,
        parameters: Parameters,
        dtype: DType,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Parameters> {
        if parameters.is_divided() && parameters.dtype() != dtype {
            bail!(
                "weights: divided in {:?}, must be in {dtype:?}",
                parameters.dtype()
            );
        }
        let division = self.division(dtype, ranks);
        match division.filter(|division| division.divides_on(parameters.device())) {
            Some(division) if !parameters.is_divided() => parameters.divided(&division),
            _ => Ok(parameters),
        }
    }

    /// Returns the division of weights that train with these options between the ranks in
    /// `collective`, as in [`Self::divide`], for weights that are divided while they are
    /// [read](Parameters::load_folder_divided). `None` if it leaves the weights as they are.
    pub fn division(
        &self,
        dtype: DType,
        (collective, sharding): (&Arc<dyn Collective>, Sharding),
    ) -> Option<WeightDivision> {
        let has_masters = self.master_weights == MasterWeights::F32 && dtype != DType::F32;
        let of_masters = |ranks| WeightDivision::of_masters(dtype, self.shard(ranks));
        let division = match sharding {
            Sharding::Full if collective.world_size() > 1 => {
                let shard = self.shard(collective);
                Some(WeightDivision::full(dtype, shard, has_masters))
            }
            Sharding::Resident if collective.world_size() > 1 => {
                has_masters.then(|| of_masters(collective))
            }
            _ if self.memory == StateMemory::Host => {
                let alone: Arc<dyn Collective> = Arc::new(Alone);
                has_masters.then(|| of_masters(&alone))
            }
            _ => None,
        };
        division.map(|division| division.with_memory(self.memory))
    }

    /// The division of tensors between the ranks in `collective`, for an optimizer with these
    /// options.
    pub(crate) fn shard(&self, collective: &Arc<dyn Collective>) -> Shard {
        Shard::new(Arc::clone(collective), self.unit())
    }

    /// Each rank's part of a tensor is a multiple of this number of elements.
    fn unit(&self) -> usize {
        // Codes have a scale for each block, and random numbers come in eights.
        match (self.state, self.master_weights) {
            (StateForm::Blocks8, _) => NUMBERS_IN_BLOCK,
            (StateForm::F32, MasterWeights::Bf16) => 8,
            (StateForm::F32, MasterWeights::F32) => 1,
        }
    }
}

/// The dtype of the weights that the steps of [`AdamW`] add up in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MasterWeights {
    /// f32. A model that computes in bf16 has a copy beside it: 6 bytes a parameter.
    #[default]
    F32,
    /// bf16, which the model computes in, too: 2 bytes a parameter. Each step rounds up or down at
    /// random, so that steps below the precision of bf16 add up on average
    /// ([`Rounding::Stochastic`]). The random numbers depend on the name of the parameter, the
    /// place of the number and the step only.
    ///
    /// Choose it where f32 does not fit. The parameters must be bf16, see
    /// [`Parameters::to_dtype`].
    Bf16,
}

/// The memory for the state of [`AdamW`], and for the f32 weights of a model that computes in bf16
/// or f16. The results do not depend on it, beyond rounding. A checkpoint of either continues with
/// the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StateMemory {
    /// The device that computes.
    #[default]
    Device,
    /// The main memory (ZeRO-Offload, <https://arxiv.org/abs/2101.06840>). For each step, gradients
    /// are copied to the CPU, which updates the weights, and these are copied back. In bf16 and
    /// f16, the output layer trains on the rounded weights. On the CPU nothing changes.
    Host,
}

impl StateMemory {
    /// The device with the state of a model on `device`.
    pub(crate) fn beside(self, device: &Device) -> Device {
        match self {
            Self::Device => device.clone(),
            Self::Host => Device::Cpu,
        }
    }
}

/// The key of the random numbers of a parameter: FNV-1a of its name
/// (<https://www.rfc-editor.org/rfc/rfc9923>).
fn key(name: &str) -> u64 {
    let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, add)
}

/// The form of the state of [`AdamW`] in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum StateForm {
    /// f32: 8 bytes per parameter. For f64 parameters the state is f64: 16 bytes.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// Blocks of 256 8-bit codes with a shared scale, as in bitsandbytes
    /// (<https://arxiv.org/abs/2110.02861>): 2.03 bytes per parameter. Parameters with fewer than
    /// 4,096 elements stay in f32. See [`moment_blocks`] for the codes.
    #[serde(rename = "8bit")]
    Blocks8,
}

/// Minimum number of elements in a parameter to store its state in blocks.
const LEAST_IN_BLOCKS: usize = 4096;

impl StateForm {
    /// The dtype and shape for each moment, given the parameter's dtype and shape.
    fn moment(self, dtype: DType, parameter: &Shape) -> (DType, Shape) {
        match self {
            Self::Blocks8 if parameter.elem_count() >= LEAST_IN_BLOCKS => {
                (DType::U8, moment_blocks(parameter.elem_count()))
            }
            _ => (dtype, parameter.clone()),
        }
    }

    /// Bytes for both moments, for an f32 parameter with this shape.
    pub fn num_bytes(self, parameter: &Shape) -> usize {
        let (dtype, shape) = self.moment(DType::F32, parameter);
        2 * shape.elem_count() * dtype.size_in_bytes()
    }
}

/// Selects which parameters decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecayRule {
    /// Linear layer matrices: no norms, biases or embedding, even if the embedding is tied to the
    /// output layer.
    #[default]
    Matrices,
    /// All parameters, like a single PyTorch parameter group.
    All,
}

impl DecayRule {
    fn applies(self, name: &str, variable: &Var) -> bool {
        match self {
            Self::Matrices => variable.rank() >= 2 && !name.ends_with("embed_tokens.weight"),
            Self::All => true,
        }
    }
}

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019). The arithmetic matches
/// `torch.optim.AdamW`, with state in f32 or [8 bits](StateForm::Blocks8). Parameters, state and
/// arithmetic can also be f64, see [`Parameters::to_dtype`].
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    moments: BTreeMap<String, Moments>,
    steps: usize,
    /// Ranks that divide the moments. Each keeps only its part.
    shard: Option<Shard>,
    /// The tensors that the ranks divide.
    sharding: Sharding,
    is_torn: bool,
}

/// Running means of a parameter's gradients and squared gradients.
#[derive(Debug)]
struct Moments {
    /// Parameter shape.
    shape: Shape,
    /// The dtype and the device of the parameter.
    dtype: DType,
    device: Device,
    /// Moment shape, all parts included.
    whole: Shape,
    average: Var,
    square: Var,
}

impl AdamW {
    /// Creates an optimizer for these parameters.
    ///
    /// # Errors
    ///
    /// If an option is invalid, or a parameter is neither f32 nor f64, nor bf16 with
    /// [`MasterWeights::Bf16`], or is f64 for a state in blocks.
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Result<Self> {
        let alone: Arc<dyn Collective> = Arc::new(Alone);
        Self::sharded(config, parameters, &alone, Sharding::None)
    }

    /// Creates an optimizer whose state the ranks in `collective` divide (ZeRO,
    /// <https://arxiv.org/abs/1910.02054>), as `sharding` says. Each rank stores the state for its
    /// part of every parameter, updates that part, and receives the others.
    ///
    /// The gradients must come from [`Self::begin_reduction`]. All ranks must call
    /// [`Self::scaled_step`] and [`Self::state`] together.
    ///
    /// [Divided](AdamWConfig::divide) parameters make any optimizer one of the sharding with which
    /// they were divided.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`]. Also if the weights are divided for another [`AdamWConfig::state`].
    pub fn sharded(
        config: AdamWConfig,
        parameters: &Parameters,
        collective: &Arc<dyn Collective>,
        sharding: Sharding,
    ) -> Result<Self> {
        config.validate()?;
        let is_alone = collective.world_size() == 1 || sharding == Sharding::None;
        let is_host = config.memory == StateMemory::Host;
        if is_host && !is_alone && sharding == Sharding::Optimizer {
            bail!("sharding: optimizer, must be none, resident or full with memory: host");
        }
        let (shard, sharding) = match parameters.shard() {
            Some(shard) if !shard.unit().is_multiple_of(config.unit()) => bail!(
                "state: {} with master_weights {}, must be the options that the weights were divided with",
                Name(&config.state),
                Name(&config.master_weights)
            ),
            Some(shard) if parameters.is_full() => (Some(shard.clone()), Sharding::Full),
            Some(shard) => (Some(shard.clone()), Sharding::Resident),
            None if is_alone => (None, Sharding::None),
            None => (Some(config.shard(collective)), sharding),
        };
        let moments = parameters
            .iter()
            .map(|(name, variable)| {
                let (shape, dtype) = (variable.shape().clone(), variable.dtype());
                match (dtype, config.state) {
                    (DType::F32, _) | (DType::F64, StateForm::F32) => {}
                    (DType::BF16, _) if config.master_weights == MasterWeights::Bf16 => {}
                    (DType::BF16 | DType::F16, _) if parameters.master(name).is_some() => {}
                    (DType::F64, StateForm::Blocks8) => {
                        bail!("state: 8bit, must be f32 for {name}, which is F64")
                    }
                    _ => bail!(
                        "parameters: {name} is {dtype:?}, must be F32 to train, F64, or BF16 with master_weights bf16"
                    ),
                }
                let (moment, whole) = config.state.moment(arithmetic_dtype(dtype), &shape);
                let kept = match (&shard, moment) {
                    (None, _) => whole.clone(),
                    (Some(shard), DType::U8) => moment_blocks(shard.kept(shape.elem_count())),
                    (Some(shard), _) => shard.kept(shape.elem_count()).into(),
                };
                let device = variable.device().clone();
                let zeros = || Var::zeros(&kept, moment, &config.memory.beside(&device));
                let (average, square) = (zeros()?, zeros()?);
                let moments = Moments {
                    shape,
                    dtype,
                    device,
                    whole,
                    average,
                    square,
                };
                Ok((name.to_owned(), moments))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            config,
            moments,
            steps: 0,
            is_torn: false,
            shard,
            sharding,
        })
    }

    /// The tensors that the ranks divide: none if there is only one.
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// Sums `gradients` over all ranks, starting with the next backward pass, as
    /// [`Gradients::begin_reduction`] does. Each rank receives only the sums for its own part of
    /// what the ranks divide.
    ///
    /// With [`Sharding::Resident`] and [`Sharding::Full`], every backward pass in an optimizer step
    /// must follow a call, and all ranks must have as many. Otherwise only the last one must. Norms
    /// cover all parts, so all ranks must compute them.
    ///
    /// # Errors
    ///
    /// If the thread that sums cannot be started, or another rank has ended.
    pub fn begin_reduction(
        &self,
        gradients: &mut Gradients,
        collective: &Arc<dyn Collective>,
    ) -> Result<()> {
        match (&self.shard, self.sharding) {
            (Some(shard), Sharding::Resident | Sharding::Full) => {
                gradients.begin(Sums::Divided(shard.clone()))
            }
            (Some(shard), _) => gradients.begin(Sums::Parts(shard.clone())),
            (None, _) => gradients.begin_reduction(collective),
        }
    }

    /// Updates every variable in `parameters` in place.
    ///
    /// A gradient is converted to the dtype of the arithmetic: f32, or f64 for a variable in f64.
    ///
    /// Decoders that share the variables see the change. First drop all graphs that use the
    /// variables: a later backward pass would mix old and new values. This method does not check
    /// that the gradients are finite, see [`Gradients::global_norm`].
    ///
    /// # Errors
    ///
    /// If `parameters` or `gradients` do not match this optimizer, or an option is invalid. In that
    /// case nothing has changed.
    pub fn step(&mut self, parameters: &Parameters, gradients: &Gradients) -> Result<()> {
        self.scaled_step(parameters, gradients, 1.0, &ComputeCopies::default())
    }

    /// Like [`Self::step`], with all gradients multiplied by `gradient_factor`, see
    /// [`Gradients::clip_factor`]. It also refreshes `copies` in the same pass over memory.
    ///
    /// # Errors
    ///
    /// Same as [`Self::step`]. Also if `gradient_factor` is not finite.
    ///
    /// ```
    /// use candle_core::{DType, Device, Result};
    /// use candle_grpo_nn::{AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
    /// let parameters = Parameters::init(&model, 7, &Device::Cpu)?;
    /// let (vb, copies) = parameters.copied_var_builder(DType::BF16)?;
    /// let decoder = Decoder::new(&model, vb)?;
    /// let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    ///
    /// let mut gradients = Gradients::new();
    /// for (name, variable) in parameters.iter() {
    ///     gradients.add(name, &variable.ones_like()?)?;
    /// }
    /// let (norm, factor) = gradients.clip_factor(1.0)?;
    /// optimizer.scaled_step(&parameters, &gradients, factor, &copies)?;
    /// let embedding = parameters.get("model.embed_tokens.weight").expect("every model has one");
    /// let rounded = embedding.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
    /// let copy = decoder.output_weight().to_dtype(DType::F32)?;
    /// assert_eq!(copy.to_vec2::<f32>()?, rounded.to_vec2::<f32>()?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn scaled_step(
        &mut self,
        parameters: &Parameters,
        gradients: &Gradients,
        gradient_factor: f64,
        copies: &ComputeCopies,
    ) -> Result<()> {
        self.config.validate()?;
        self.check_fit(parameters, gradients)?;
        let step = AdamWStep {
            learning_rate: self.config.learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            step: self.steps + 1,
            gradient_factor,
        };
        let mut has_written = false;
        let stepped = match &self.shard {
            None => self.step_of_all(parameters, gradients, &step, copies, &mut has_written),
            Some(shard) => self
                .step_of_part(shard, parameters, gradients, &step, &mut has_written)
                .and_then(|()| copies.refresh()),
        };
        self.is_torn = has_written && stepped.is_err();
        stepped?;
        self.steps += 1;
        Ok(())
    }

    /// Returns whether the last step has failed after it changed some of the parameters or of the
    /// state. Only [loading](Self::load_state) both can then repeat it.
    pub fn is_torn(&self) -> bool {
        self.is_torn
    }

    /// Updates whole parameters.
    fn step_of_all(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        step: &AdamWStep,
        copies: &ComputeCopies,
        has_written: &mut bool,
    ) -> Result<()> {
        let inputs = self.moments.keys();
        let inputs = inputs.map(|name| self.inputs(name, parameters, gradients, copies));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let tensors: Vec<_> = self
            .moments
            .iter()
            .zip(&inputs)
            .map(|((name, moments), input)| AdamWTensors {
                parameter: &input.parameter,
                master: input.master.as_ref(),
                rounding: moments.rounding(name, input.master.is_some(), 0),
                average: &moments.average,
                square: &moments.square,
                gradient: &input.gradient,
                weight_decay: input.weight_decay,
            })
            .collect();
        adamw(&tensors, step)?;
        *has_written = true;
        copies.refresh_others()
    }

    /// Updates this rank's part of each parameter, and receives the other ranks' parts.
    fn step_of_part(
        &self,
        shard: &Shard,
        parameters: &Parameters,
        gradients: &Gradients,
        step: &AdamWStep,
        has_written: &mut bool,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for (name, moments) in &self.moments {
            let Some(parameter) = parameters.get(name) else {
                bail!("{name}: no variable, must have one");
            };
            let elements = parameter.elem_count();
            let master = parameters.master(name);
            let master = master.map(|master| shard.kept_parts(master, elements));
            let [first, rest] = gradients.parts(shard, name)?;
            let part = Part {
                master: master.transpose()?,
                parameter: match parameters.own(name) {
                    Some(own) => shard.kept_parts(&own, elements)?,
                    None => shard.own(parameter, elements)?,
                },
                gradient: [
                    beside(moments.dtype, &first)?,
                    beside(moments.dtype, &rest)?,
                ],
                average: shard.kept_parts(&moments.average, elements)?,
                square: shard.kept_parts(&moments.square, elements)?,
                first: shard.ranges(elements).map(|range| range.start),
            };
            parts.push((name, moments, part, self.weight_decay(name, parameter)));
        }
        // A parameter's part and remainder share memory.
        for i in 0..2 {
            let tensors: Vec<_> = parts
                .iter()
                .map(|(name, moments, part, weight_decay)| AdamWTensors {
                    parameter: &part.parameter[i],
                    master: part.master.as_ref().map(|master| &master[i]),
                    rounding: moments.rounding(name, part.master.is_some(), part.first[i]),
                    average: &part.average[i],
                    square: &part.square[i],
                    gradient: &part.gradient[i],
                    weight_decay: *weight_decay,
                })
                .collect();
            adamw(&tensors, step)?;
            *has_written = true;
        }
        // Of the others, each rank has its part alone.
        let whole = parameters.iter();
        let whole = whole.filter(|(name, _)| parameters.own(name).is_none());
        let whole: Vec<Tensor> = whole
            .map(|(_, variable)| variable.as_detached_tensor())
            .collect();
        shard.all_gather(&whole)
    }

    fn weight_decay(&self, name: &str, parameter: &Var) -> f64 {
        if self.config.decay.applies(name, parameter) {
            self.config.weight_decay
        } else {
            0.0
        }
    }

    /// A whole parameter for a step, and what belongs to it except the moments.
    fn inputs(
        &self,
        name: &str,
        parameters: &Parameters,
        gradients: &Gradients,
        copies: &ComputeCopies,
    ) -> Result<Inputs> {
        let (Some(variable), Some(gradient)) = (parameters.get(name), gradients.get(name)) else {
            bail!("{name}: no variable or no gradient, must have both");
        };
        let (parameter, master) = match (copies.rounded(variable), parameters.master(name)) {
            (Some(copy), _) => (copy, Some(variable.as_detached_tensor())),
            (None, Some(master)) => (variable, Some(master.reshape(variable.shape())?)),
            (None, None) => (variable, None),
        };
        Ok(Inputs {
            parameter: parameter.as_detached_tensor(),
            master: master.map(|master| master.detach()),
            gradient: beside(variable.dtype(), gradient)?,
            weight_decay: self.weight_decay(name, variable),
        })
    }

    /// Learning rate for the next step.
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Sets the learning rate for the next step. [`Self::step`] fails if it is negative or not
    /// finite.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.learning_rate = learning_rate;
    }

    /// Sets the options for the next steps. The state stays.
    ///
    /// # Errors
    ///
    /// If an option is invalid, or [`AdamWConfig::state`], [`AdamWConfig::master_weights`] or
    /// [`AdamWConfig::memory`] is another one.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<()> {
        config.validate()?;
        if config.state != self.config.state {
            bail!(
                "state: {:?}, must stay {:?}",
                config.state,
                self.config.state
            );
        }
        if config.master_weights != self.config.master_weights {
            bail!(
                "master_weights: {:?}, must stay {:?}",
                config.master_weights,
                self.config.master_weights
            );
        }
        if config.memory != self.config.memory {
            bail!(
                "memory: {:?}, must stay {:?}",
                config.memory,
                self.config.memory
            );
        }
        self.config = config;
        Ok(())
    }

    /// The options, with the learning rate for the next step.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Number of completed steps.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The state to checkpoint: `exp_avg.NAME` and `exp_avg_sq.NAME` for every parameter, in its
    /// dtype or as u8 [`moment_blocks`], and `step`, an i64 scalar on the CPU.
    ///
    /// The tensors share memory with the optimizer. Save or copy them before the next
    /// [`Self::step`], which changes them. If several ranks share the state, the tensors are copies
    /// with all parts.
    ///
    /// # Errors
    ///
    /// If another rank that shares the state has ended.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state = HashMap::from([(STEP.to_owned(), self.step_tensor()?)]);
        for (name, moments, moment) in self.named_moments() {
            state.insert(name, self.whole(moments, moment)?);
        }
        Ok(state)
    }

    fn step_tensor(&self) -> Result<Tensor> {
        Tensor::new(self.steps as i64, &Device::Cpu)
    }

    /// All moments with their names, in the order of a file, in which ranks gather them.
    fn named_moments(&self) -> Vec<(String, &Moments, &Var)> {
        let all = self.moments.iter();
        let all = all.flat_map(|(name, moments)| {
            let named = moments.named(name).into_iter();
            named.map(move |(name, moment)| (name, moments, moment))
        });
        let mut all: Vec<_> = all.collect();
        all.sort_by(|(left, _, a), (right, _, b)| {
            safetensors_writer::file_order((a.dtype().into(), left), (b.dtype().into(), right))
        });
        all
    }

    /// The whole of `moment`, which is one of `moments`.
    fn whole(&self, moments: &Moments, moment: &Var) -> Result<Tensor> {
        let Some(shard) = &self.shard else {
            return Ok(moment.as_detached_tensor());
        };
        // Ranks exchange tensors on the device that computes.
        let moment = moment.to_device(&moments.device)?;
        let whole = Tensor::zeros(&moments.whole, moment.dtype(), &moments.device)?;
        let elements = moments.shape.elem_count();
        let divided = match moment.dtype() {
            DType::U8 => whole.clone(),
            _ => whole.flatten_all()?,
        };
        shard.gather(&moment, &divided, elements)?;
        Ok(whole)
    }

    /// Supports another rank's [`Self::state`] call without building the result. Does nothing
    /// unless several ranks share the state.
    ///
    /// # Errors
    ///
    /// If another rank has ended.
    pub fn take_part_in_state(&self) -> Result<()> {
        if self.shard.is_none() {
            return Ok(());
        }
        let mut all = self.named_moments().into_iter();
        all.try_for_each(|(_, moments, moment)| self.whole(moments, moment).map(drop))
    }

    /// Writes [`Self::state`] to one safetensors file [atomically](crate::atomic_file), tensor by
    /// tensor.
    pub fn save_state(&self, path: &Path) -> Result<()> {
        let moments = self.named_moments().into_iter();
        let moments = moments.map(|(name, moments, moment)| {
            let kind = (moment.dtype(), moments.whole.dims().to_vec());
            LazyTensor::computed(name, kind, move || self.whole(moments, moment))
        });
        let write = || {
            let step = LazyTensor::of(STEP.to_owned(), self.step_tensor()?);
            safetensors_writer::write(path, moments.chain([step]).collect(), || Ok(()))
        };
        write().map_err(|error| {
            Error::msg(format!(
                "cannot save the state of the optimizer to {}: {error}",
                path.display()
            ))
        })
    }

    /// Restores [`Self::state`] bit-identically, from any device. Options are not part of the
    /// state.
    ///
    /// # Errors
    ///
    /// If names, shapes or dtypes do not match the parameters. In that case nothing has changed.
    pub fn load_state(&mut self, state: HashMap<String, Tensor>) -> Result<()> {
        self.load(&state)
    }

    /// Restores [`Self::state`] from the file that [`Self::save_state`] wrote, tensor by tensor. If
    /// ranks divide the state, each of them reads its part.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_state`]. Also if the file cannot be read; then the state may be partly
    /// restored.
    pub fn load_state_from(&mut self, path: &Path) -> Result<()> {
        let state = StoredTensor::read_file(path);
        state.and_then(|state| self.load(&state)).map_err(|error| {
            Error::msg(format!(
                "cannot load the state of the optimizer from {}: {error}",
                path.display()
            ))
        })
    }

    fn load<T: Values>(&mut self, state: &HashMap<String, T>) -> Result<()> {
        self.is_torn = false;
        let step = (Shape::from(()), DType::I64);
        let mut expected = BTreeMap::from([(STEP.to_owned(), step)]);
        for (name, moments) in &self.moments {
            for (name, moment) in moments.named(name) {
                expected.insert(name, (moments.whole.clone(), moment.dtype()));
            }
        }
        check_names("state", &expected, state)?;
        for (name, (shape, dtype)) in &expected {
            let found = &state[name];
            let found_dtype = found.dtype()?;
            if name != STEP && (found_dtype == DType::U8) != (*dtype == DType::U8) {
                let form = |dtype| if dtype == DType::U8 { "8bit" } else { "f32" };
                bail!(
                    "state {name}: {}, must be {} as optimizer.state",
                    form(found_dtype),
                    form(*dtype)
                );
            }
            if found.dims() != shape.dims() {
                bail!(
                    "state {name}: shape {:?}, must be {:?}",
                    found.dims(),
                    shape.dims()
                );
            }
            if dtype.is_float() && !found_dtype.is_float() {
                bail!("state {name}: dtype {found_dtype:?}, must be a floating-point type");
            }
        }
        let steps = state[STEP]
            .read_elements(0..1)?
            .to_dtype(DType::F64)?
            .squeeze(0)?
            .to_scalar::<f64>()?;
        if !(steps >= 0.0 && steps.fract() == 0.0) {
            bail!("state {STEP}: {steps}, must be a whole number that is not negative");
        }
        for (name, moments) in &self.moments {
            for (name, moment) in moments.named(name) {
                let state = &state[&name];
                let elements = moments.shape.elem_count();
                let read = |range: Range<usize>| match moment.dtype() {
                    DType::U8 => {
                        let [first, last] = [range.start, range.end].map(bytes_before);
                        state.read_elements(first..last)
                    }
                    _ => state.read_elements(range),
                };
                let own = match &self.shard {
                    None => read(0..elements)?,
                    Some(shard) => shard.read(elements, read)?,
                };
                copy_into(moment, &own.reshape(moment.shape())?)?;
            }
        }
        self.steps = steps as usize;
        Ok(())
    }

    fn check_fit(&self, parameters: &Parameters, gradients: &Gradients) -> Result<()> {
        gradients.ensure_summed()?;
        if let Some(weights) = parameters.divided_weights() {
            weights.ensure_free()?;
        }
        let missing: Vec<_> = self
            .moments
            .keys()
            .filter(|name| gradients.kind(name).is_none())
            .cloned()
            .collect();
        if !missing.is_empty() {
            bail!(
                "gradients: none for {} of {} parameters, must have {}",
                missing.len(),
                self.moments.len(),
                missing.join(", ")
            );
        }
        if let Some(name) = gradients
            .names()
            .find(|name| !self.moments.contains_key(*name))
        {
            bail!("gradients: {name}, must be a parameter of this optimizer");
        }
        if let Some((name, _)) = parameters
            .iter()
            .find(|(name, _)| !self.moments.contains_key(*name))
        {
            bail!("parameters: {name}, must be a parameter of this optimizer");
        }
        for (name, moments) in &self.moments {
            let Moments {
                shape,
                dtype,
                device,
                ..
            } = moments;
            let Some(variable) = parameters.get(name) else {
                bail!("parameters: no {name}, must have it");
            };
            if variable.shape() != shape {
                bail!(
                    "parameter {name}: shape {:?}, must be {:?}",
                    variable.dims(),
                    shape.dims()
                );
            }
            if variable.dtype() != *dtype {
                bail!(
                    "parameter {name}: dtype {:?}, must be {dtype:?}",
                    variable.dtype()
                );
            }
            if let Some((found, on)) = gradients.kind(name)
                && (found != shape || !on.same_device(device))
            {
                bail!(
                    "gradient of {name}: {:?} on {:?}, must be {:?} on {:?}",
                    found.dims(),
                    on.location(),
                    shape.dims(),
                    device.location()
                );
            }
        }
        Ok(())
    }
}

const STEP: &str = "step";

/// The bytes of [`moment_blocks`] before the block in which `element` would be the first.
fn bytes_before(element: usize) -> usize {
    moment_blocks(element).elem_count()
}

/// A parameter, and what belongs to it except the moments.
struct Inputs {
    parameter: Tensor,
    /// The f32 weight of a rounded parameter.
    master: Option<Tensor>,
    /// In the dtype of the arithmetic.
    gradient: Tensor,
    weight_decay: f64,
}

/// This rank's part of a parameter and of what belongs to it, and the remainder.
struct Part {
    parameter: [Tensor; 2],
    master: Option<[Tensor; 2]>,
    gradient: [Tensor; 2],
    average: [Tensor; 2],
    square: [Tensor; 2],
    /// The first element in each.
    first: [usize; 2],
}

impl Moments {
    /// Returns the rounding of the parameter `name`, which may have an f32 master, from the element
    /// `first` on.
    fn rounding(&self, name: &str, has_master: bool, first: usize) -> Rounding {
        match self.dtype {
            DType::BF16 if !has_master => Rounding::Stochastic {
                key: key(name),
                first: first as u64,
            },
            _ => Rounding::Nearest,
        }
    }

    /// The moments of the parameter `name`, with their names in a checkpoint.
    fn named(&self, name: &str) -> [(String, &Var); 2] {
        [
            (format!("exp_avg.{name}"), &self.average),
            (format!("exp_avg_sq.{name}"), &self.square),
        ]
    }
}
