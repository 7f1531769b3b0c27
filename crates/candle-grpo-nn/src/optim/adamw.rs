//! The AdamW optimizer.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::Collective;
use candle_grpo_core::validate;
use candle_grpo_kernels::{AdamWStep, AdamWTensors, adamw, moment_blocks};
use serde::{Deserialize, Serialize};

use super::shard::Shard;
use crate::weights::check::check_names;
use crate::weights::parameters::copy_into;
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::{ComputeCopies, Gradients, Parameters};

/// The options of [`AdamW`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate. Use about 1e-6 for reinforcement learning of a pretrained model.
    pub learning_rate: f64,
    /// Decay rate of the mean of gradients, in [0, 1). Default 0.9.
    pub beta1: f64,
    /// Decay rate of the mean of squared gradients, in [0, 1). Default 0.999.
    pub beta2: f64,
    /// Added to the denominator for numerical stability. Default 1e-8.
    pub epsilon: f64,
    /// Decoupled weight decay: each step multiplies a parameter by `1 - learning_rate *
    /// weight_decay`, as in PyTorch. Default 0.01.
    pub weight_decay: f64,
    /// The parameters that decay: `matrices` (those of linear layers) or `all`.
    pub decay: DecayRule,
    /// The form of the state in memory: `f32`, or `8bit` (blocks with a common scale).
    pub state: StateForm,
}

impl AdamWConfig {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns an error that names the option that is not valid.
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
    /// The numbers of PyTorch, with a learning rate of 1e-3. Only matrices decay.
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            decay: DecayRule::default(),
            state: StateForm::default(),
        }
    }
}

/// The form of the state of [`AdamW`] in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StateForm {
    /// f32: 8 bytes a parameter. For parameters in f64 it is f64: 16 bytes.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// Blocks of 256 codes of 8 bits with a common scale, as in bitsandbytes
    /// (<https://arxiv.org/abs/2110.02861>): 2.03 bytes a parameter. Parameters of less than 4,096
    /// numbers keep f32. See [`moment_blocks`] for the codes.
    #[serde(rename = "8bit")]
    Blocks8,
}

/// The least number of elements of a parameter whose state is in blocks.
const LEAST_IN_BLOCKS: usize = 4096;

impl StateForm {
    /// The dtype and shape of a moment of a parameter of this dtype and shape.
    fn moment(self, dtype: DType, parameter: &Shape) -> (DType, Shape) {
        match self {
            Self::Blocks8 if parameter.elem_count() >= LEAST_IN_BLOCKS => {
                (DType::U8, moment_blocks(parameter.elem_count()))
            }
            _ => (dtype, parameter.clone()),
        }
    }

    /// The bytes of both moments of an f32 parameter of this shape.
    pub fn num_bytes(self, parameter: &Shape) -> usize {
        let (dtype, shape) = self.moment(DType::F32, parameter);
        2 * shape.elem_count() * dtype.size_in_bytes()
    }
}

/// Selection of the parameters that decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayRule {
    /// The matrices of linear layers: no norms, no biases, no embedding, whether tied to the output
    /// layer or not.
    #[default]
    Matrices,
    /// All parameters, as in one parameter group of PyTorch.
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

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019), with the arithmetic of
/// `torch.optim.AdamW` and its state in f32 or in [8 bits](StateForm::Blocks8). Parameters, state
/// and arithmetic may also be in f64, see [`Parameters::to_dtype`].
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    moments: BTreeMap<String, Moments>,
    steps: usize,
    /// The ranks that share the moments. Each then has one-dimensional moments of what it keeps.
    shard: Option<Shard>,
}

/// The running means of the gradients of a parameter and of their squares.
#[derive(Debug)]
struct Moments {
    /// The shape of the parameter.
    shape: Shape,
    /// The dtype of the parameter: f32 or f64.
    dtype: DType,
    /// The shape of a moment, all parts included.
    whole: Shape,
    average: Var,
    square: Var,
}

impl AdamW {
    /// Creates an optimizer of these parameters, before its first step.
    ///
    /// # Errors
    ///
    /// If an option is invalid, or a parameter is neither f32 nor f64, or is f64 for a state in
    /// blocks.
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Result<Self> {
        Self::with_shard(config, parameters, None)
    }

    /// Creates an optimizer whose state the ranks of `collective` share (ZeRO, stage 1,
    /// <https://arxiv.org/abs/1910.02054>): each has the state of its part of every parameter,
    /// updates it, and receives the other parts.
    ///
    /// The gradients must be those of [`Gradients::begin_reduction`] with `scatter`. All ranks must
    /// call [`Self::scaled_step`] and [`Self::state`] together.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`], and if the state is in blocks, which ranks cannot divide.
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
        let moments = parameters
            .iter()
            .map(|(name, variable)| {
                let (shape, dtype) = (variable.shape().clone(), variable.dtype());
                match (dtype, config.state) {
                    (DType::F32, _) | (DType::F64, StateForm::F32) => {}
                    (DType::F64, StateForm::Blocks8) => {
                        bail!("state: 8bit, must be f32 for {name}, which is F64")
                    }
                    _ => bail!("parameters: {name} is {dtype:?}, must be F32 to train, or F64"),
                }
                let (moment, whole) = config.state.moment(dtype, &shape);
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

    /// Returns true if several ranks share the state.
    pub fn is_sharded(&self) -> bool {
        self.shard.is_some()
    }

    /// Updates every variable of `parameters` in place.
    ///
    /// A gradient of another dtype than its variable is converted.
    ///
    /// Decoders that share the variables see the change. Drop all graphs that use the variables
    /// before: a later backward pass would mix old and new values. This method does not check
    /// that the gradients are finite, see [`Gradients::global_norm`].
    ///
    /// # Errors
    ///
    /// If `parameters` or `gradients` do not match this optimizer, or an option is invalid. Nothing
    /// has changed then.
    pub fn step(&mut self, parameters: &Parameters, gradients: &Gradients) -> Result<()> {
        self.scaled_step(parameters, gradients, 1.0, &ComputeCopies::default())
    }

    /// [`Self::step`] with all gradients times `gradient_factor`, see [`Gradients::clip_factor`].
    /// It also refreshes `copies`, in the same pass over the memory.
    ///
    /// # Errors
    ///
    /// As in [`Self::step`], and if `gradient_factor` is not finite.
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
            .values()
            .zip(&inputs)
            .map(|(moments, (parameter, gradient, weight_decay))| {
                let copy = copies.rounded(parameter);
                AdamWTensors {
                    parameter: copy.unwrap_or(parameter),
                    master: copy.map(|_| parameter.as_tensor()),
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

    /// Updates the part of this rank of each parameter, and receives those of the other ranks.
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
        // The part and the remainder of a parameter share memory.
        for i in 0..2 {
            let tensors: Vec<_> = views
                .iter()
                .map(
                    |((parameter, gradient, average, square), weight_decay)| AdamWTensors {
                        parameter: &parameter[i],
                        master: None,
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

    /// The variable, the gradient in its dtype, and the weight decay of a parameter.
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
        Ok((
            parameter,
            gradient.to_dtype(parameter.dtype())?,
            weight_decay,
        ))
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Sets the learning rate of the next step. [`Self::step`] returns an error if it is negative
    /// or not finite.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.learning_rate = learning_rate;
    }

    /// The options, with the learning rate of the next step.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Number of completed steps.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The state for a checkpoint: `exp_avg.NAME` and `exp_avg_sq.NAME` for every parameter, in its
    /// dtype or as u8 [`moment_blocks`], and `step`, an i64 scalar on the CPU.
    ///
    /// The tensors share the memory of the optimizer. Save or copy them before the next
    /// [`Self::step`], which changes them. If several ranks share the state, the tensors are copies
    /// of all parts.
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

    /// Takes part in [`Self::state`] of another rank, without the memory of its result. Does
    /// nothing unless several ranks share the state.
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

    /// Restores the state of [`Self::state`] bit-identically, from any device. Options are not part
    /// of the state.
    ///
    /// # Errors
    ///
    /// If names, shapes or dtypes do not match the parameters. Nothing has changed then.
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
    /// The moments of the parameter `name`, with their names in a checkpoint.
    fn named(&self, name: &str) -> [(String, &Var); 2] {
        [
            (format!("exp_avg.{name}"), &self.average),
            (format!("exp_avg_sq.{name}"), &self.square),
        ]
    }
}
