//! One AdamW step, in place.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod host;
pub(crate) mod moments;
pub(crate) mod rounding;

use candle_core::{DType, Result, Tensor, bail};

use self::moments::moment_blocks;
use self::rounding::{EIGHT, Random, Rounding};
use crate::precision::arithmetic_dtype;
use crate::{check, path};

/// A parameter, its gradient and its optimizer state, all with the same shape and device. Only
/// moments in blocks have another shape. The state, which is the master and both moments, may be on
/// the CPU beside a parameter and a gradient on another device: the step then runs on the CPU.
#[derive(Debug, Clone, Copy)]
pub struct AdamWTensors<'a> {
    /// The parameter, in any float dtype: a variable, or a contiguous part of one.
    pub parameter: &'a Tensor,
    /// The master copy of a bf16 or f16 parameter, in f32. The step updates the master and rounds
    /// it to the parameter. Without a master, steps below the precision of the dtype are lost,
    /// unless [`Self::rounding`] is stochastic.
    pub master: Option<&'a Tensor>,
    /// The rounding to the dtype of the parameter. A parameter with a master needs
    /// [`Rounding::Nearest`].
    pub rounding: Rounding,
    /// The moving average of gradients, in f32 (f64 for an f64 parameter), or in blocks of 8-bit
    /// codes, see [`moment_blocks`].
    pub average: &'a Tensor,
    /// The moving average of squared gradients, in the same form.
    pub square: &'a Tensor,
    /// The gradient, in f32, bf16 or f16 (f64 for an f64 parameter).
    pub gradient: &'a Tensor,
    /// The weight decay coefficient. The step multiplies the parameter by
    /// `1 - learning_rate * weight_decay`.
    pub weight_decay: f64,
}

/// Hyperparameters for one step, shared by all parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Step size.
    pub learning_rate: f64,
    /// Decay for the gradient average, in [0, 1).
    pub beta1: f64,
    /// Decay for the squared gradient average, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// Index of this step, starting at 1. It determines the bias correction.
    pub step: usize,
    /// Multiplies all gradients, for clipping; 1 for none. The product is in f32, and the
    /// gradients do not change.
    pub gradient_factor: f64,
}

/// Updates all parameters with AdamW (<https://arxiv.org/abs/1711.05101>), in place.
///
/// This is one pass over memory, and one launch on CUDA. If the state is on the CPU and the
/// parameter on CUDA, the gradient is copied to the CPU and the parameter back, piece by piece
/// while the CPU computes others: the bits are those of a step on the CPU. The device needs no
/// memory for it, and the CPU about 32 MiB. Step t with the gradient g is
///
/// ```text
/// m = beta1 m + (1 - beta1) g
/// v = beta2 v + (1 - beta2) g^2
/// p = p (1 - learning_rate weight_decay)
///     - learning_rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
/// ```
///
/// as in `torch.optim.AdamW`. Drop all graphs that use the parameters first: their backward pass
/// would mix old and new values.
///
/// # Errors
///
/// Fails if a hyperparameter is out of range, if shapes, dtypes or devices differ, or if tensors
/// share memory. In these cases nothing has changed.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_grpo_kernels::{AdamWStep, AdamWTensors, Rounding, adamw};
///
/// let parameter = Var::new(&[1f32, 1.], &Device::Cpu)?;
/// let (average, square) = (parameter.zeros_like()?, parameter.zeros_like()?);
/// let (average, square) = (Var::from_tensor(&average)?, Var::from_tensor(&square)?);
/// let tensors = AdamWTensors {
///     parameter: &parameter,
///     master: None,
///     rounding: Rounding::Nearest,
///     average: &average,
///     square: &square,
///     gradient: &Tensor::new(&[0.5f32, -2.], &Device::Cpu)?,
///     weight_decay: 0.0,
/// };
/// let step = AdamWStep {
///     learning_rate: 0.1,
///     beta1: 0.9,
///     beta2: 0.999,
///     epsilon: 1e-8,
///     step: 1,
///     gradient_factor: 1.0,
/// };
/// adamw(&[tensors], &step)?;
/// let parameter = parameter.to_vec1::<f32>()?;
/// assert!((parameter[0] - 0.9).abs() < 1e-6 && (parameter[1] - 1.1).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn adamw(parameters: &[AdamWTensors], step: &AdamWStep) -> Result<()> {
    check_arguments(parameters, step)?;
    let (fused, rest): (Vec<_>, Vec<_>) = parameters
        .iter()
        // Candle treats an empty tensor as one whose elements share memory.
        .filter(|tensors| tensors.parameter.elem_count() > 0)
        .partition(|tensors| path::is_fused_on_cpu(tensors.parameter));
    cpu::step(&fused, step)?;
    #[cfg(feature = "cuda")]
    let rest = {
        let (fused, rest): (Vec<&AdamWTensors>, Vec<_>) = rest
            .into_iter()
            .partition(|tensors| path::is_fused(tensors.parameter));
        let (on_host, fused): (Vec<_>, Vec<_>) = fused
            .into_iter()
            .partition(|tensors| tensors.average.device().is_cpu());
        host::step(&on_host, step)?;
        cuda::step(&fused, step)?;
        rest
    };
    rest.into_iter()
        .try_for_each(|tensors| composed::unchecked(tensors, step))
}

pub(crate) fn check_arguments(parameters: &[AdamWTensors], step: &AdamWStep) -> Result<()> {
    step.check()?;
    for tensors in parameters {
        tensors.check()?;
        if tensors.rounding != Rounding::Nearest && u32::try_from(step.step).is_err() {
            bail!(
                "step: {}, must be below 2^32 for stochastic rounding",
                step.step
            );
        }
    }
    let written: Vec<&Tensor> = parameters.iter().flat_map(AdamWTensors::written).collect();
    let read: Vec<&Tensor> = parameters.iter().map(|tensors| tensors.gradient).collect();
    check::apart("parameters", &written, &read)
}

impl AdamWStep {
    fn check(&self) -> Result<()> {
        for (name, value) in [
            ("learning_rate", self.learning_rate),
            ("epsilon", self.epsilon),
        ] {
            check::not_negative(name, value)?;
        }
        for (name, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                bail!("{name}: {value}, must be at least 0 and below 1");
            }
        }
        if !self.gradient_factor.is_finite() {
            bail!("gradient_factor: {}, must be finite", self.gradient_factor);
        }
        if self.step == 0 {
            bail!("step: 0, the first step is 1");
        }
        Ok(())
    }

    pub(crate) fn coefficients(&self, weight_decay: f64) -> Coefficients {
        // A float, because the step may exceed the range of an integer power.
        let t = self.step as f64;
        Coefficients {
            beta1: self.beta1,
            beta2: self.beta2,
            epsilon: self.epsilon,
            keep: 1.0 - self.learning_rate * weight_decay,
            step_size: self.learning_rate / (1.0 - self.beta1.powf(t)),
            root_correction: (1.0 - self.beta2.powf(t)).sqrt(),
            gradient_factor: self.gradient_factor,
        }
    }
}

/// Coefficients for one step, the same for all elements in a parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coefficients {
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) epsilon: f64,
    /// `1 - learning_rate * weight_decay`.
    pub(crate) keep: f64,
    /// `learning_rate / (1 - beta1^t)`.
    pub(crate) step_size: f64,
    /// `sqrt(1 - beta2^t)`.
    pub(crate) root_correction: f64,
    pub(crate) gradient_factor: f64,
}

/// [`Coefficients`] in f32.
#[derive(Clone, Copy)]
pub(crate) struct Narrow {
    pub(crate) beta1: f32,
    pub(crate) one_minus_beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) one_minus_beta2: f32,
    pub(crate) epsilon: f32,
    pub(crate) keep: f32,
    pub(crate) step_size: f32,
    pub(crate) inverse_root_correction: f32,
    pub(crate) gradient_factor: f32,
}

impl From<Coefficients> for Narrow {
    fn from(c: Coefficients) -> Self {
        Self {
            beta1: c.beta1 as f32,
            one_minus_beta1: (1.0 - c.beta1) as f32,
            beta2: c.beta2 as f32,
            one_minus_beta2: (1.0 - c.beta2) as f32,
            epsilon: c.epsilon as f32,
            keep: c.keep as f32,
            step_size: c.step_size as f32,
            inverse_root_correction: (1.0 / c.root_correction) as f32,
            gradient_factor: c.gradient_factor as f32,
        }
    }
}

impl AdamWTensors<'_> {
    fn written(&self) -> impl Iterator<Item = &Tensor> {
        [
            Some(self.parameter),
            self.master,
            Some(self.average),
            Some(self.square),
        ]
        .into_iter()
        .flatten()
    }

    /// Returns whether the moments are in blocks.
    pub(crate) fn is_quantized(&self) -> bool {
        self.average.dtype() == DType::U8
    }

    /// Returns the random numbers of a step; `None` if the parameter is rounded to nearest.
    pub(crate) fn random(&self, step: &AdamWStep) -> Option<Random> {
        match self.rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic { key, first } => Some(Random {
                key,
                step: step.step as u32,
                eight: first / EIGHT,
            }),
        }
    }

    fn check_rounding(&self) -> Result<()> {
        let Rounding::Stochastic { first, .. } = self.rounding else {
            return Ok(());
        };
        if self.parameter.dtype() != DType::BF16 || self.master.is_some() {
            let master = if self.master.is_some() {
                " with a master"
            } else {
                ""
            };
            bail!(
                "rounding: stochastic for a parameter of {:?}{master}, must be nearest, unless it is bf16 without a master",
                self.parameter.dtype()
            );
        }
        if !first.is_multiple_of(EIGHT) {
            bail!("rounding: first {first}, must be a multiple of {EIGHT}");
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        check::float("parameter", self.parameter)?;
        self.check_rounding()?;
        check::not_negative("weight_decay", self.weight_decay)?;
        let state = arithmetic_dtype(self.parameter.dtype());
        let half = !matches!(self.parameter.dtype(), DType::F32 | DType::F64);
        if self.master.is_some() && !half {
            bail!(
                "master: given for a parameter of {:?}, must be absent unless the parameter is bf16 or f16",
                self.parameter.dtype()
            );
        }
        if self.is_quantized() && state == DType::F64 {
            bail!("average: U8, must be F64 for a parameter of F64");
        }
        let of_state = (state, self.parameter.shape().clone());
        let of_moment = if self.is_quantized() {
            (DType::U8, moment_blocks(self.parameter.elem_count()))
        } else {
            of_state.clone()
        };
        let mut others = vec![
            ("average", self.average, &of_moment),
            ("square", self.square, &of_moment),
        ];
        others.extend(self.master.map(|master| ("master", master, &of_state)));
        for (name, tensor, (dtype, _)) in &others {
            if tensor.dtype() != *dtype {
                bail!("{name}: {:?}, must be {dtype:?}", tensor.dtype());
            }
        }
        let written = others.iter().map(|&(name, tensor, _)| (name, tensor));
        for (name, tensor) in written.chain([("parameter", self.parameter)]) {
            if !tensor.is_contiguous() {
                bail!(
                    "{name}: shape {:?} with the strides {:?}, must be contiguous",
                    tensor.dims(),
                    tensor.stride()
                );
            }
        }
        others.push(("gradient", self.gradient, &of_state));
        check::float("gradient", self.gradient)?;
        if !matches!(
            self.gradient.dtype(),
            DType::F32 | DType::BF16 | DType::F16 | DType::F64
        ) {
            bail!(
                "gradient: {:?}, must be f32, bf16, f16 or f64",
                self.gradient.dtype()
            );
        }
        if arithmetic_dtype(self.gradient.dtype()) != state {
            bail!(
                "gradient: {:?} for a parameter of {:?}, both or neither must be f64",
                self.gradient.dtype(),
                self.parameter.dtype()
            );
        }
        for (name, tensor, (_, shape)) in others {
            if tensor.shape() != shape {
                bail!(
                    "{name}: shape {:?}, must be {:?} for a parameter of shape {:?}",
                    tensor.dims(),
                    shape.dims(),
                    self.parameter.dims()
                );
            }
            let is_apart = name != "gradient" && self.average.device().is_cpu();
            let beside = if is_apart {
                ("average", self.average)
            } else {
                ("parameter", self.parameter)
            };
            check::same_device(&[beside, (name, tensor)])?;
        }
        Ok(())
    }
}
