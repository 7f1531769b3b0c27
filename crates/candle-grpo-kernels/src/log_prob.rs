//! Log-probs of tokens from logits.

use candle_core::{
    CpuStorage, CustomOp1, InplaceOp1, Layout, Result, Shape, Tensor, WithDType, bail,
};

use crate::cpu::with_floats;
use crate::{check, composed, cpu, path};

/// What [`log_prob`] says of each position, all differentiable, in f32 (f64 for f64 logits).
#[derive(Debug, Clone)]
pub struct TokenLogProbs {
    /// The log-probability of the target, of the shape of the targets.
    pub log_probs: Tensor,
    /// The entropy of the distribution in nats, of the same shape.
    pub entropy: Tensor,
    /// The logarithm of the sum of `exp(logits / temperature)`, of the same shape.
    pub log_sum_exp: Tensor,
}

/// What [`log_prob`] may be told besides; the default is no mask and a gradient in memory of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogProbOptions<'a> {
    /// The positions that count, of the shape of the targets, any dtype, 0 where a position is dropped. A dropped
    /// position costs nothing: its results and its gradient are 0, whatever its logits and target are.
    pub mask: Option<&'a Tensor>,
    /// Whether the backward pass writes the gradient over the logits, which saves memory of their size. Then nothing
    /// else may read the logits from that backward pass on: neither the caller nor the backward pass of the operation
    /// that made them (that of a matrix product does not). An error for logits that are a variable. f64, and logits
    /// whose layout makes a copy necessary, are never overwritten.
    pub gradient_into_logits: bool,
}

/// Log-probs of `targets` under `softmax(logits / temperature)`, with the entropy and the normaliser of that
/// distribution.
///
/// `logits` `[.., V]` of any float dtype, `targets` integers `[..]` below V. `temperature` is that of sampling: it must
/// be the same here, or the ratio of new to old policy starts away from 1. Entries of minus infinity are outside the
/// distribution: probability 0, no part in the entropy, gradient 0. One pass over the logits forward, one backward;
/// arithmetic in f32 whatever the logits are.
///
/// Errs on other shapes and dtypes, a temperature that is not positive and finite, and targets that are out of range
/// (checked on the CPU; on a GPU that would be a transfer, and such a target has a log-prob of NaN).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{LogProbOptions, log_prob};
///
/// let logits = Tensor::new(&[[0f32, 0., 0., 0.], [0., 0., f32::NEG_INFINITY, f32::NEG_INFINITY]], &Device::Cpu)?;
/// let targets = Tensor::new(&[2u32, 1], &Device::Cpu)?;
/// let tokens = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
/// let log_probs = tokens.log_probs.to_vec1::<f32>()?;
/// assert!((log_probs[0] - 0.25f32.ln()).abs() < 1e-6 && (log_probs[1] - 0.5f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn log_prob(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<TokenLogProbs> {
    let arguments = Arguments::new(logits, targets, temperature, options)?;
    if !path::is_fused(logits) {
        return composed::log_prob_rows(&arguments);
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

/// The gradient by `logits` of a scalar whose derivatives by the results of [`log_prob`] are known: the backward pass
/// of [`log_prob`] alone, for loops that need its memory.
///
/// Candle's `backward` adds every gradient to a tensor of zeros and keeps the sum, which takes two more tensors of the
/// size of the logits than this, or three with `options.gradient_into_logits`.
///
/// `tokens` is what [`log_prob`] returned for the same arguments, `derivatives` has the scalar's derivative by each of its
/// results, of the shape of the targets. The gradient has the shape and dtype of the logits and no graph.
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
    if !path::is_fused(logits) {
        let logits = candle_core::Var::from_tensor(&logits.detach())?;
        let options = LogProbOptions {
            gradient_into_logits: false,
            ..options
        };
        let again = composed::log_prob(&logits, targets, temperature, options)?;
        let score = (again.pack("tokens", &arguments.outer)? * gradient)?.sum_all()?;
        let gradients = score.backward()?;
        return match gradients.get(&logits) {
            Some(gradient) => Ok(gradient.detach()),
            None => logits.zeros_like(),
        };
    }
    let backward = Backward {
        rows: &arguments.rows,
        packed,
        gradient,
    };
    backward.apply(&arguments.logits.detach(), options.gradient_into_logits)
}

impl TokenLogProbs {
    /// From `[3, N]`: log-probs, entropy and log-sum-exp. Each takes the shape `outer`.
    pub(crate) fn unpack(packed: &Tensor, outer: &[usize]) -> Result<Self> {
        let part = |index| packed.narrow(0, index, 1)?.reshape(outer);
        Ok(Self {
            log_probs: part(0)?,
            entropy: part(1)?,
            log_sum_exp: part(2)?,
        })
    }

    /// To contiguous `[3, N]`; `name` is that of the argument.
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

/// The arguments of [`log_prob`], checked.
pub(crate) struct Arguments {
    /// `[.., V]`, contiguous: N rows. They keep their shape, since in a graph each reshape takes their memory twice.
    pub(crate) logits: Tensor,
    pub(crate) rows: Rows,
    pub(crate) temperature: f64,
    /// The shape of the results.
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

/// What a pass needs to know of the rows besides their logits.
#[derive(Clone)]
pub(crate) struct Rows {
    /// `[N]` of u32.
    pub(crate) targets: Tensor,
    /// `[N]` of u8.
    pub(crate) mask: Option<Tensor>,
    pub(crate) inverse_temperature: f32,
}

impl Rows {
    /// Checks what the operators have in common. The rows are those of `source`, given with its name and of shape
    /// `[outer.., _]`.
    pub(crate) fn new(
        source: (&str, &Tensor),
        outer: &[usize],
        vocab: usize,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<Self> {
        check::positive("temperature", temperature)?;
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
        })
    }
}

/// Logits `[.., V]` to f32 `[3, N]`.
struct LogProb {
    rows: Rows,
    gradient_into_logits: bool,
}

impl CustomOp1 for LogProb {
    fn name(&self) -> &'static str {
        "log_prob"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, (rows, vocab)) = (cpu::range(layout)?, rows_and_width(layout));
        let packed = with_floats!(storage, "logits", logits => {
            cpu::log_prob::forward(&logits[range], vocab, &self.rows)?
        });
        Ok((CpuStorage::F32(packed), Shape::from((3, rows))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::log_prob::forward(storage, layout, &self.rows)
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

/// The N rows of a tensor `[.., V]`, and V, which is not 0.
pub(crate) fn rows_and_width(layout: &Layout) -> (usize, usize) {
    let width = layout.dims().last().copied().unwrap_or(1);
    (layout.shape().elem_count() / width, width)
}

/// Logits `[.., V]` to their gradient, in their dtype, in memory of its own or in theirs.
pub(crate) struct Backward<'a> {
    pub(crate) rows: &'a Rows,
    /// The result of the forward pass, f32 `[3, N]`.
    pub(crate) packed: Tensor,
    /// Its gradient, f32 `[3, N]`.
    pub(crate) gradient: Tensor,
}

impl Backward<'_> {
    /// The gradient of `logits`, which have no graph.
    fn apply(&self, logits: &Tensor, into_logits: bool) -> Result<Tensor> {
        if into_logits {
            // Candle takes an empty tensor for one whose elements share memory.
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
        let (range, (_, vocab)) = (cpu::range(layout)?, rows_and_width(layout));
        let gradient = with_floats!(storage, "logits", logits => {
            WithDType::to_cpu_storage_owned(cpu::log_prob::backward(&logits[range], vocab, self)?)
        });
        Ok((gradient, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::log_prob::backward(storage, layout, self)
    }
}

impl InplaceOp1 for Backward<'_> {
    fn name(&self) -> &'static str {
        "log_prob_backward_in_place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (range, (_, vocab)) = (cpu::range(layout)?, rows_and_width(layout));
        with_floats!(storage, "logits", logits => {
            cpu::log_prob::backward_in_place(&mut logits[range], vocab, self)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::log_prob::backward_in_place(storage, layout, self)
    }
}
