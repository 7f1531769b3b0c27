//! Log-probs from logits.

pub(crate) mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use candle_core::{
    CpuStorage, CustomOp1, InplaceOp1, Layout, Result, Shape, Tensor, WithDType, bail,
};

use crate::cpu::{slice, with_floats};
use crate::{check, graph, path};

/// Results from [`log_prob`] for each position. All are differentiable, in f32 (f64 for f64
/// logits).
#[derive(Debug, Clone)]
pub struct TokenLogProbs {
    /// Log-prob of each target, in the shape of the targets.
    pub log_probs: Tensor,
    /// Entropy of the distribution in nats, in the same shape.
    pub entropy: Tensor,
    /// Logarithm of the sum over `exp(logits / temperature)`, in the same shape.
    pub log_sum_exp: Tensor,
}

/// Options for [`log_prob`]. By default there is no mask, and the gradient has its own memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogProbOptions<'a> {
    /// A mask in the shape of the targets, any dtype. Where it is 0, results and gradient are 0
    /// for any logits and target, and the position costs nothing. Absent by default.
    pub mask: Option<&'a Tensor>,
    /// If set, the backward pass overwrites the logits with their gradient, which saves as much
    /// memory as the logits take. Nothing may read the logits afterward: neither you nor the
    /// backward pass of the operation that produced them. A matrix product does not read them.
    ///
    /// Fails for logits that are a variable. f64 logits, and logits that need a contiguous copy,
    /// are not overwritten. Default `false`.
    pub gradient_into_logits: bool,
    /// Applies this [`soft_cap`](crate::soft_cap) to each logit, before the temperature.
    /// [`log_prob`] then uses plain Candle operations, and does not overwrite the logits. Absent
    /// by default.
    pub logit_cap: Option<f64>,
}

/// Returns log-probs of `targets` under `softmax(logits / temperature)`, with that distribution's
/// entropy and log-sum-exp.
///
/// Use the sampling temperature. Otherwise, the first ratio between new and old policy is not 1. A
/// logit of minus infinity has probability 0, does not contribute to the entropy, and gets gradient
/// 0. Each pass reads the logits once. Arithmetic is f32 for every logit dtype except f64.
///
/// # Shapes
///
/// - `logits`: `[.., V]`, any float dtype
/// - `targets`: `[..]`, integers below V
/// - results: `[..]`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, if the temperature is outside
/// [`TEMPERATURES`](crate::TEMPERATURES), or if a target is out of range. Only the CPU checks
/// targets, because the check would synchronize a GPU. There, such a target has log-prob NaN.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{LogProbOptions, log_prob};
///
/// let inf = f32::INFINITY;
/// let logits = Tensor::new(&[[0f32, 0., 0., 0.], [0., 0., -inf, -inf]], &Device::Cpu)?;
/// let targets = Tensor::new(&[2u32, 1], &Device::Cpu)?;
/// let tokens = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
/// let log_probs = tokens.log_probs.to_vec1::<f32>()?;
/// assert!((log_probs[0] - 0.25f32.ln()).abs() < 1e-6);
/// assert!((log_probs[1] - 0.5f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn log_prob(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<TokenLogProbs> {
    let arguments = Arguments::new(logits, targets, temperature, options)?;
    if !is_fused(logits, &options) {
        return composed::unchecked(&arguments);
    }
    let Arguments {
        logits,
        rows,
        outer,
        ..
    } = arguments;
    let packed = logits.apply_op1(LogProb {
        rows,
        gradient_into_logits: options.gradient_into_logits,
    })?;
    TokenLogProbs::unpack(&packed, &outer)
}

/// Computes the backward pass for [`log_prob`], without a graph.
///
/// `tokens` is the result from [`log_prob`] for the same arguments. `derivatives` are a scalar's
/// derivatives with respect to each result, in the shape of the targets. Returns the scalar's
/// gradient with respect to the logits, in their shape and dtype.
///
/// Candle's `backward` adds each gradient to a zero tensor and keeps the sum. This function needs
/// two tensors less, each as large as the logits, or three less with
/// [`LogProbOptions::gradient_into_logits`].
///
/// # Errors
///
/// Same as [`log_prob`]. Also fails if `tokens` or `derivatives` do not have the shape of the
/// targets.
pub fn log_prob_gradient(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
    tokens: &TokenLogProbs,
    derivatives: &TokenLogProbs,
) -> Result<Tensor> {
    let arguments = Arguments::new(logits, targets, temperature, options)?;
    let packed = tokens.pack("tokens", &arguments.outer)?.detach();
    let gradient = derivatives.pack("derivatives", &arguments.outer)?.detach();
    if !is_fused(logits, &options) {
        let options = LogProbOptions {
            gradient_into_logits: false,
            ..options
        };
        let [gradient] = graph::gradients([logits], &gradient, |[logits]| {
            composed::log_prob(logits, targets, temperature, options)?
                .pack("tokens", &arguments.outer)
        })?;
        return Ok(gradient);
    }
    let backward = Backward {
        rows: &arguments.rows,
        packed,
        gradient,
    };
    backward.apply(&arguments.logits.detach(), options.gradient_into_logits)
}

/// Returns whether a fused path exists. None has a cap. Without rows none is needed, and Candle's
/// operations would fail on CUDA.
fn is_fused(logits: &Tensor, options: &LogProbOptions) -> bool {
    path::is_fused(logits) && (options.logit_cap.is_none() || logits.elem_count() == 0)
}

impl TokenLogProbs {
    /// Splits `[3, N]` into log-probs, entropy and log-sum-exp with shape `outer`.
    pub(crate) fn unpack(packed: &Tensor, outer: &[usize]) -> Result<Self> {
        let part = |index| packed.narrow(0, index, 1)?.reshape(outer);
        Ok(Self {
            log_probs: part(0)?,
            entropy: part(1)?,
            log_sum_exp: part(2)?,
        })
    }

    /// Stacks the results to contiguous `[3, N]`. Errors use `name`.
    pub(crate) fn pack(&self, name: &str, outer: &[usize]) -> Result<Tensor> {
        let parts = [&self.log_probs, &self.entropy, &self.log_sum_exp];
        if let Some(part) = parts.iter().find(|part| part.dims() != outer) {
            bail!(
                "{name}: shape {:?}, must be that of targets, {outer:?}",
                part.dims()
            );
        }
        let rows = parts.map(|part| part.flatten_all());
        let [log_probs, entropy, log_sum_exp] = rows;
        Tensor::stack(&[log_probs?, entropy?, log_sum_exp?], 0)
    }
}

/// Checked arguments to [`log_prob`].
pub(crate) struct Arguments {
    /// `[.., V]`, contiguous; N rows. Not reshaped, because in a graph a reshape allocates twice
    /// their memory.
    pub(crate) logits: Tensor,
    pub(crate) rows: Rows,
    pub(crate) temperature: f64,
    /// Result shape.
    pub(crate) outer: Vec<usize>,
}

impl Arguments {
    pub(crate) fn new(
        logits: &Tensor,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<Self> {
        check::float("logits", logits)?;
        let Some((&vocab, outer)) = logits.dims().split_last() else {
            bail!("logits: a scalar, must be [.., V]");
        };
        if vocab == 0 {
            bail!("logits: shape {:?}, the vocabulary is empty", logits.dims());
        }
        if options.gradient_into_logits && logits.is_variable() {
            bail!(
                "gradient_into_logits: the logits are a variable, which the gradient would overwrite"
            );
        }
        let rows = Rows::new(
            ("logits", logits),
            outer,
            vocab,
            targets,
            temperature,
            options,
        )?;
        Ok(Self {
            rows,
            temperature,
            outer: outer.to_vec(),
            logits: logits.contiguous()?,
        })
    }
}

/// Inputs to a pass other than the logits.
#[derive(Clone)]
pub(crate) struct Rows {
    /// u32 `[N]`.
    pub(crate) targets: Tensor,
    /// u8 `[N]`.
    pub(crate) mask: Option<Tensor>,
    pub(crate) inverse_temperature: f32,
    pub(crate) logit_cap: Option<f64>,
}

impl Rows {
    /// Checks the arguments that both operators share. `source` is the tensor with the rows, with
    /// shape `[outer.., _]`, and its name.
    pub(crate) fn new(
        source: (&str, &Tensor),
        outer: &[usize],
        vocab: usize,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<Self> {
        check::temperature(temperature)?;
        if let Some(cap) = options.logit_cap {
            check::positive("logit_cap", cap)?;
        }
        check::same_device(&[source, ("targets", targets)])?;
        if let Some(mask) = options.mask {
            check::same_device(&[source, ("mask", mask)])?;
        }
        let mask = options
            .mask
            .map(|mask| check::mask(mask, outer))
            .transpose()?;
        Ok(Self {
            targets: check::targets(targets, source.0, outer, vocab, mask.as_ref())?,
            mask,
            inverse_temperature: (1.0 / temperature) as f32,
            logit_cap: options.logit_cap,
        })
    }
}

/// Maps logits `[.., V]` to f32 `[3, N]`.
struct LogProb {
    rows: Rows,
    gradient_into_logits: bool,
}

impl CustomOp1 for LogProb {
    fn name(&self) -> &'static str {
        "log_prob"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, (rows, vocab)) = (slice::range(layout)?, rows_and_width(layout));
        let packed = with_floats!(storage, "logits", logits => {
            cpu::forward(&logits[range], vocab, &self.rows)?
        });
        Ok((CpuStorage::F32(packed), Shape::from((3, rows))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(storage, layout, &self.rows)
    }

    fn bwd(&self, logits: &Tensor, packed: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (logits, packed) = (logits.detach(), packed.detach());
        let backward = Backward {
            rows: &self.rows,
            packed,
            gradient: gradient.contiguous()?,
        };
        backward.apply(&logits, self.gradient_into_logits).map(Some)
    }
}

/// Returns N and V for a tensor `[.., V]` with N rows. V is not 0.
pub(crate) fn rows_and_width(layout: &Layout) -> (usize, usize) {
    let width = layout.dims().last().copied().unwrap_or(1);
    (layout.shape().elem_count() / width, width)
}

/// Maps logits `[.., V]` to their gradient, in their dtype, in new memory or in place.
pub(crate) struct Backward<'a> {
    pub(crate) rows: &'a Rows,
    /// Result from the forward pass, f32 `[3, N]`.
    pub(crate) packed: Tensor,
    /// Gradient with respect to the result, f32 `[3, N]`.
    pub(crate) gradient: Tensor,
}

impl Backward<'_> {
    /// Returns the gradient with respect to detached `logits`.
    fn apply(&self, logits: &Tensor, into_logits: bool) -> Result<Tensor> {
        if into_logits {
            // Candle treats an empty tensor as one whose elements share memory.
            if logits.elem_count() > 0 {
                logits.inplace_op1(self)?;
            }
            Ok(logits.clone())
        } else {
            logits.apply_op1_no_bwd(&self)
        }
    }
}

impl CustomOp1 for &Backward<'_> {
    fn name(&self) -> &'static str {
        "log_prob_backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, (_, vocab)) = (slice::range(layout)?, rows_and_width(layout));
        let gradient = with_floats!(storage, "logits", logits => {
            WithDType::to_cpu_storage_owned(cpu::backward(&logits[range], vocab, self)?)
        });
        Ok((gradient, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::backward(storage, layout, self)
    }
}

impl InplaceOp1 for Backward<'_> {
    fn name(&self) -> &'static str {
        "log_prob_backward_in_place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (range, (_, vocab)) = (slice::range(layout)?, rows_and_width(layout));
        with_floats!(storage, "logits", logits => {
            cpu::backward_in_place(&mut logits[range], vocab, self)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        cuda::backward_in_place(storage, layout, self)
    }
}
