//! The AdamW optimizer.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_grpo_core::validate;
use candle_grpo_kernels::{AdamWStep, AdamWTensors, adamw};
use serde::{Deserialize, Serialize};

use crate::atomic_file::write_safetensors;
use crate::weights::check::check_names;
use crate::weights::parameters::copy_into;
use crate::{ComputeCopies, Gradients, Parameters};

/// The options of [`AdamW`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate. Default 1e-3, as in PyTorch. Use about 1e-6 for reinforcement learning of a
    /// pretrained model.
    pub learning_rate: f64,
    /// Decay rate of the mean of gradients, in [0, 1). Default 0.9.
    pub beta1: f64,
    /// Decay rate of the mean of squared gradients, in [0, 1). Default 0.999.
    pub beta2: f64,
    /// Added to the denominator for numerical stability. Default 1e-8.
    pub epsilon: f64,
    /// Decoupled weight decay: each step multiplies a parameter by `1 - learning_rate *
    /// weight_decay`. Default 0.01, as in PyTorch.
    pub weight_decay: f64,
    /// Selection of the parameters that decay. Default [`DecayRule::Matrices`].
    pub decay: DecayRule,
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
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            decay: DecayRule::default(),
        }
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
/// `torch.optim.AdamW` and its state in f32.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// The running means of the gradients and of their squares.
    moments: BTreeMap<String, (Var, Var)>,
    steps: usize,
    /// `steps` as a tensor, so that [`Self::state`] cannot fail.
    steps_tensor: Tensor,
}

impl AdamW {
    /// Creates an optimizer of these parameters, before its first step.
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Result<Self> {
        config.validate()?;
        let moments = parameters
            .iter()
            .map(|(name, variable)| {
                let zeros = || Var::zeros(variable.shape(), DType::F32, variable.device());
                Ok((name.to_owned(), (zeros()?, zeros()?)))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            config,
            moments,
            steps: 0,
            steps_tensor: scalar(0)?,
        })
    }

    /// Updates every variable of `parameters` in place.
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
        let steps = self.steps + 1;
        let steps_tensor = scalar(steps)?;
        let config = &self.config;
        let tensors = self
            .moments
            .iter()
            .map(|(name, (average, square))| {
                let (Some(parameter), Some(gradient)) = (parameters.get(name), gradients.get(name))
                else {
                    bail!("{name}: no variable or no gradient, must have both");
                };
                let decays = config.decay.applies(name, parameter);
                let copy = copies.rounded(parameter);
                Ok(AdamWTensors {
                    parameter: copy.unwrap_or(parameter),
                    master: copy.and(Some(parameter)),
                    average,
                    square,
                    gradient,
                    weight_decay: if decays { config.weight_decay } else { 0.0 },
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let step = AdamWStep {
            learning_rate: config.learning_rate,
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            step: steps,
            gradient_factor,
        };
        adamw(&tensors, &step)?;
        copies.refresh_others()?;
        self.steps = steps;
        self.steps_tensor = steps_tensor;
        Ok(())
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

    /// The state for a checkpoint: `exp_avg.NAME` and `exp_avg_sq.NAME` in f32 for every parameter,
    /// and `step`, an i64 scalar on the CPU.
    ///
    /// The tensors share the memory of the optimizer. Save or copy them before the next
    /// [`Self::step`], which changes them.
    pub fn state(&self) -> HashMap<String, Tensor> {
        let mut state = HashMap::from([(STEP.to_owned(), self.steps_tensor.clone())]);
        for (name, (average, square)) in &self.moments {
            state.insert(average_name(name), average.as_detached_tensor());
            state.insert(square_name(name), square.as_detached_tensor());
        }
        state
    }

    /// Writes [`Self::state`] to one safetensors file [atomically](crate::atomic_file).
    pub fn save_state(&self, path: &Path) -> Result<()> {
        let tensors = self
            .state()
            .into_iter()
            .map(|(name, tensor)| Ok((name, tensor.to_device(&Device::Cpu)?)))
            .collect::<Result<Vec<_>>>()?;
        write_safetensors(path, tensors, None).map_err(|error| {
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
        let mut expected = BTreeMap::from([(STEP.to_owned(), Shape::from(()))]);
        for (name, (average, square)) in &self.moments {
            expected.insert(average_name(name), average.shape().clone());
            expected.insert(square_name(name), square.shape().clone());
        }
        check_names("state", &expected, &state)?;
        for (name, shape) in &expected {
            if state[name].shape() != shape {
                bail!(
                    "state {name}: shape {:?}, must be {:?}",
                    state[name].dims(),
                    shape.dims()
                );
            }
            if name != STEP && !state[name].dtype().is_float() {
                bail!(
                    "state {name}: dtype {:?}, must be a floating-point type",
                    state[name].dtype()
                );
            }
        }
        let steps = state[STEP].to_dtype(DType::F64)?.to_scalar::<f64>()?;
        if !(steps >= 0.0 && steps.fract() == 0.0) {
            bail!("state {STEP}: {steps}, must be a whole number that is not negative");
        }
        for (name, (average, square)) in &self.moments {
            copy_into(average, &state[&average_name(name)])?;
            copy_into(square, &state[&square_name(name)])?;
        }
        let steps = steps as usize;
        self.steps_tensor = scalar(steps)?;
        self.steps = steps;
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
        for (name, (average, _)) in &self.moments {
            let Some(variable) = parameters.get(name) else {
                bail!("parameters: no {name}, must have it");
            };
            if variable.shape() != average.shape() {
                bail!(
                    "parameter {name}: shape {:?}, must be {:?}",
                    variable.dims(),
                    average.dims()
                );
            }
            if let Some(gradient) = gradients.get(name)
                && (gradient.shape() != average.shape()
                    || gradient.dtype() != DType::F32
                    || !gradient.device().same_device(average.device()))
            {
                bail!(
                    "gradient of {name}: {:?} of {:?} on {:?}, must be {:?} of f32 on {:?}",
                    gradient.dims(),
                    gradient.dtype(),
                    gradient.device().location(),
                    average.dims(),
                    average.device().location()
                );
            }
        }
        Ok(())
    }
}

const STEP: &str = "step";

fn scalar(steps: usize) -> Result<Tensor> {
    Tensor::new(steps as i64, &Device::Cpu)
}

fn average_name(name: &str) -> String {
    format!("exp_avg.{name}")
}

fn square_name(name: &str) -> String {
    format!("exp_avg_sq.{name}")
}
