//! The AdamW optimizer.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::Collective;
use candle_grpo_core::validate;
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, Rounding, adamw, arithmetic_dtype, moment_blocks,
};
use serde::{Deserialize, Serialize};

use super::shard::Shard;
use crate::weights::check::check_names;
use crate::weights::parameters::copy_into;
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::{ComputeCopies, Gradients, Parameters};

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
    /// Ranks that share the moments. Each stores only its part, as one-dimensional moments.
    shard: Option<Shard>,
}

/// Running means of a parameter's gradients and squared gradients.
#[derive(Debug)]
struct Moments {
    /// Parameter shape.
    shape: Shape,
    /// The dtype of the parameter: f32, f64 or bf16.
    dtype: DType,
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
        Self::with_shard(config, parameters, None)
    }

    /// Creates an optimizer that shares its state between the ranks in `collective` (ZeRO, stage 1,
    /// <https://arxiv.org/abs/1910.02054>). Each rank stores the state for its part of every
    /// parameter, updates that part, and receives the others.
    ///
    /// The gradients must come from [`Gradients::begin_reduction`] with `scatter`. All ranks must
    /// call [`Self::scaled_step`] and [`Self::state`] together.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`], and if the state is in blocks, or the master weights are bf16: ranks do
    /// not divide these.
    pub fn sharded(
        config: AdamWConfig,
        parameters: &Parameters,
        collective: &Arc<dyn Collective>,
    ) -> Result<Self> {
        let shard = (collective.world_size() > 1).then(|| Shard(Arc::clone(collective)));
        Self::with_shard(config, parameters, shard)
    }

    fn with_shard(
        config: AdamWConfig,
        parameters: &Parameters,
        shard: Option<Shard>,
    ) -> Result<Self> {
        config.validate()?;
        validate::check(
            shard.is_none() || config.state == StateForm::F32,
            "state",
            "8bit",
            "be f32 for a state that ranks share",
        )?;
        validate::check(
            shard.is_none() || config.master_weights == MasterWeights::F32,
            "master_weights",
            "bf16",
            "be f32 for a state that ranks share",
        )?;
        let moments = parameters
            .iter()
            .map(|(name, variable)| {
                let (shape, dtype) = (variable.shape().clone(), variable.dtype());
                match (dtype, config.state) {
                    (DType::F32, _) | (DType::F64, StateForm::F32) => {}
                    (DType::BF16, _) if config.master_weights == MasterWeights::Bf16 => {}
                    (DType::F64, StateForm::Blocks8) => {
                        bail!("state: 8bit, must be f32 for {name}, which is F64")
                    }
                    _ => bail!(
                        "parameters: {name} is {dtype:?}, must be F32 to train, F64, or BF16 with master_weights bf16"
                    ),
                }
                let (moment, whole) = config.state.moment(arithmetic_dtype(dtype), &shape);
                let kept = match &shard {
                    None => whole.clone(),
                    Some(shard) => shard.kept(shape.elem_count()).into(),
                };
                let zeros = || Var::zeros(&kept, moment, variable.device());
                let (average, square) = (zeros()?, zeros()?);
                let moments = Moments {
                    shape,
                    dtype,
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
            shard,
        })
    }

    /// Returns whether several ranks share the state.
    pub fn is_sharded(&self) -> bool {
        self.shard.is_some()
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
        match &self.shard {
            None => self.step_of_all(parameters, gradients, &step, copies)?,
            Some(shard) => {
                self.step_of_part(shard, parameters, gradients, &step)?;
                copies.refresh()?;
            }
        }
        self.steps += 1;
        Ok(())
    }

    /// Updates whole parameters.
    fn step_of_all(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        step: &AdamWStep,
        copies: &ComputeCopies,
    ) -> Result<()> {
        let inputs = self.moments.keys();
        let inputs = inputs.map(|name| self.inputs(name, parameters, gradients));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let tensors: Vec<_> = self
            .moments
            .iter()
            .zip(&inputs)
            .map(|((name, moments), (parameter, gradient, weight_decay))| {
                let copy = copies.rounded(parameter);
                AdamWTensors {
                    parameter: copy.unwrap_or(parameter),
                    master: copy.map(|_| parameter.as_tensor()),
                    rounding: moments.rounding(name),
                    average: &moments.average,
                    square: &moments.square,
                    gradient,
                    weight_decay: *weight_decay,
                }
            })
            .collect();
        adamw(&tensors, step)?;
        copies.refresh_others()
    }

    /// Updates this rank's part of each parameter, and receives the other ranks' parts.
    fn step_of_part(
        &self,
        shard: &Shard,
        parameters: &Parameters,
        gradients: &Gradients,
        step: &AdamWStep,
    ) -> Result<()> {
        let mut views = Vec::new();
        for (name, moments) in &self.moments {
            let (parameter, gradient, weight_decay) = self.inputs(name, parameters, gradients)?;
            let elements = parameter.elem_count();
            let parts = (
                shard.own(parameter)?,
                shard.own(&gradient)?,
                shard.kept_parts(&moments.average, elements)?,
                shard.kept_parts(&moments.square, elements)?,
            );
            views.push((parts, weight_decay));
        }
        // A parameter's part and remainder share memory.
        for i in 0..2 {
            let tensors: Vec<_> = views
                .iter()
                .map(
                    |((parameter, gradient, average, square), weight_decay)| AdamWTensors {
                        parameter: &parameter[i],
                        master: None,
                        rounding: Rounding::Nearest,
                        average: &average[i],
                        square: &square[i],
                        gradient: &gradient[i],
                        weight_decay: *weight_decay,
                    },
                )
                .collect();
            adamw(&tensors, step)?;
        }
        let parameters = parameters.iter();
        let whole: Vec<Tensor> = parameters
            .map(|(_, variable)| variable.as_detached_tensor())
            .collect();
        shard.all_gather(&whole)
    }

    /// The variable, the gradient in the dtype of its arithmetic, and the weight decay of a
    /// parameter.
    fn inputs<'a>(
        &self,
        name: &str,
        parameters: &'a Parameters,
        gradients: &Gradients,
    ) -> Result<(&'a Var, Tensor, f64)> {
        let (Some(parameter), Some(gradient)) = (parameters.get(name), gradients.get(name)) else {
            bail!("{name}: no variable or no gradient, must have both");
        };
        let weight_decay = if self.config.decay.applies(name, parameter) {
            self.config.weight_decay
        } else {
            0.0
        };
        let gradient = gradient.to_dtype(arithmetic_dtype(parameter.dtype()))?;
        Ok((parameter, gradient, weight_decay))
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
    /// If an option is invalid, or [`AdamWConfig::state`] or [`AdamWConfig::master_weights`] is
    /// another one.
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
        let steps = Tensor::new(self.steps as i64, &Device::Cpu)?;
        let mut state = HashMap::from([(STEP.to_owned(), steps)]);
        for (name, moments) in &self.moments {
            for (name, moment) in moments.named(name) {
                let moment = match &self.shard {
                    None => moment.as_detached_tensor(),
                    Some(shard) => shard.whole(moment, &moments.whole)?,
                };
                state.insert(name, moment);
            }
        }
        Ok(state)
    }

    /// Supports another rank's [`Self::state`] call without building the result. Does nothing
    /// unless several ranks share the state.
    ///
    /// # Errors
    ///
    /// If another rank has ended.
    pub fn take_part_in_state(&self) -> Result<()> {
        let Some(shard) = &self.shard else {
            return Ok(());
        };
        for (name, moments) in &self.moments {
            for (_, moment) in moments.named(name) {
                shard.whole(moment, &moments.whole)?;
            }
        }
        Ok(())
    }

    /// Writes [`Self::state`] to one safetensors file [atomically](crate::atomic_file).
    pub fn save_state(&self, path: &Path) -> Result<()> {
        let tensors = self.state()?.into_iter();
        let tensors = tensors.map(|(name, tensor)| LazyTensor::of(name, tensor));
        safetensors_writer::write(path, tensors.collect(), || Ok(())).map_err(|error| {
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
        let step = (Shape::from(()), DType::I64);
        let mut expected = BTreeMap::from([(STEP.to_owned(), step)]);
        for (name, moments) in &self.moments {
            for (name, moment) in moments.named(name) {
                expected.insert(name, (moments.whole.clone(), moment.dtype()));
            }
        }
        check_names("state", &expected, &state)?;
        for (name, (shape, dtype)) in &expected {
            let found = &state[name];
            if name != STEP && (found.dtype() == DType::U8) != (*dtype == DType::U8) {
                let form = |dtype| if dtype == DType::U8 { "8bit" } else { "f32" };
                bail!(
                    "state {name}: {}, must be {} as optimizer.state",
                    form(found.dtype()),
                    form(*dtype)
                );
            }
            if found.shape() != shape {
                bail!(
                    "state {name}: shape {:?}, must be {:?}",
                    found.dims(),
                    shape.dims()
                );
            }
            if dtype.is_float() && !found.dtype().is_float() {
                bail!(
                    "state {name}: dtype {:?}, must be a floating-point type",
                    found.dtype()
                );
            }
        }
        let steps = state[STEP].to_dtype(DType::F64)?.to_scalar::<f64>()?;
        if !(steps >= 0.0 && steps.fract() == 0.0) {
            bail!("state {STEP}: {steps}, must be a whole number that is not negative");
        }
        for (name, moments) in &self.moments {
            for (name, moment) in moments.named(name) {
                match &self.shard {
                    None => copy_into(moment, &state[&name])?,
                    Some(shard) => {
                        let parts = shard.own(&state[&name].contiguous()?)?;
                        copy_into(moment, &Tensor::cat(&parts, 0)?)?;
                    }
                }
            }
        }
        self.steps = steps as usize;
        Ok(())
    }

    fn check_fit(&self, parameters: &Parameters, gradients: &Gradients) -> Result<()> {
        let missing: Vec<_> = self
            .moments
            .keys()
            .filter(|name| gradients.get(name).is_none())
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
        if let Some((name, _)) = gradients
            .iter()
            .find(|(name, _)| !self.moments.contains_key(*name))
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
            let Moments { shape, dtype, .. } = moments;
            let device = moments.average.device();
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
            if let Some(gradient) = gradients.get(name)
                && (gradient.shape() != shape || !gradient.device().same_device(device))
            {
                bail!(
                    "gradient of {name}: {:?} on {:?}, must be {:?} on {:?}",
                    gradient.dims(),
                    gradient.device().location(),
                    shape.dims(),
                    device.location()
                );
            }
        }
        Ok(())
    }
}

const STEP: &str = "step";

impl Moments {
    /// Returns the rounding of the parameter `name`.
    fn rounding(&self, name: &str) -> Rounding {
        match self.dtype {
            DType::BF16 => Rounding::Stochastic {
                key: key(name),
                first: 0,
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
