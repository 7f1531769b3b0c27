//! Log-probs from hidden states and the output weight.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, Var, bail,
};

use self::cpu::{Kept, Layer};
use crate::cpu::{slice, with_floats};
use crate::ops::log_prob::{Backward, LogProbOptions, Rows, TokenLogProbs, rows_and_width};
use crate::precision::arithmetic_dtype;
use crate::{check, path};

/// Logits per tile on CUDA: 256 MiB in f32, for efficient products. Tiles with more than 65,536
/// rows are larger, because a tile has at least [`CUDA_TILE_COLUMNS`].
pub const CUDA_TILE_LOGITS: usize = 1 << 26;
/// Minimum columns per tile on CUDA, unless the vocabulary is smaller.
pub const CUDA_TILE_COLUMNS: usize = 1024;
/// Maximum number of logits that CUDA keeps for the backward pass: 2 GiB in f32.
pub const CUDA_KEPT_LOGITS: usize = 1 << 29;

/// Computes [`log_prob`](crate::log_prob) for `logits = hidden weight^T + bias` without storing the
/// logits.
///
/// **Memory.** Both passes compute the logits in tiles, a few MiB each (a few hundred MiB on CUDA).
/// The backward pass allocates the gradients and at most 24 MiB. The hidden state gradient is f32
/// until it is rounded. On CUDA, up to 2^29 logits (2 GiB) are kept if there will be a backward
/// pass.
///
/// **Skipped work.** An argument without a gradient costs no product. Neither does a masked row,
/// whose gradient is 0. On CUDA the mask is read on the host, which synchronizes with the device.
///
/// **Precision.** Products are in f32, with these exceptions. On CUDA, two bf16 or two f16
/// arguments are multiplied in their dtype and summed in f32. Processors with `avx512_bf16` do the
/// same with two bf16 arguments. Where bf16 arguments are multiplied in bf16, logit gradients are
/// rounded to bf16. f64 hidden states use the composed path, which stores the logits; so does
/// [`LogProbOptions::logit_cap`] on CUDA. Results are bit-identical on any number of cores.
///
/// [`LogProbOptions::gradient_into_logits`] has no effect. Candle's `backward` adds each gradient
/// to a zero tensor, which takes as much memory as a second weight. [`LinearLogProb`] avoids this.
///
/// # Shapes
///
/// - `hidden`: `[.., H]`, `weight`: `[V, H]`, `bias`: `[V]`, any float dtypes
/// - `targets`: `[..]`, integers below V
/// - results: `[..]`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, if the temperature is outside
/// [`TEMPERATURES`](crate::TEMPERATURES), or if a target is out of range (checked on the CPU only).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::{LogProbOptions, linear_log_prob};
///
/// let hidden = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::ones((5, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?;
/// let tokens = linear_log_prob(&hidden, &weight, None, &targets, 1.0, LogProbOptions::default())?;
/// assert_eq!(tokens.log_probs.dims(), [2, 3]);
/// assert!((tokens.entropy.max_all()?.to_scalar::<f32>()? - 5f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_log_prob(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<TokenLogProbs> {
    let layer = LinearLogProb::new(hidden, weight, bias, targets, temperature, options)?;
    layer.compute(layer.arguments.clone())
}

/// [`linear_log_prob`] without a graph. You run the backward pass yourself.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_grpo_kernels::{LinearLogProb, LogProbOptions, TokenLogProbs};
///
/// let hidden = Tensor::ones((3, 8), DType::F32, &Device::Cpu)?;
/// let weight = Var::ones((5, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
/// let options = LogProbOptions::default();
/// let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, options)?;
/// let tokens = layer.forward()?;
/// // The loss is the mean of the negative log-probs.
/// let derivatives = TokenLogProbs {
///     log_probs: Tensor::new(&[-1f32 / 3.; 3], &Device::Cpu)?,
///     entropy: tokens.entropy.zeros_like()?,
///     log_sum_exp: tokens.log_sum_exp.zeros_like()?,
/// };
/// let gradients = layer.backward(&tokens, &derivatives)?;
/// assert!(gradients.hidden.is_none()); // hidden is a constant
/// assert_eq!(gradients.weight.expect("the weight is a variable").dims(), [5, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct LinearLogProb {
    /// Arguments for all rows, or for the rows in `kept`.
    arguments: Arguments,
    wanted: Wanted,
    /// The sum to which the backward pass adds the weight gradient.
    weight_sum: Option<Tensor>,
    #[cfg(feature = "cuda")]
    kept: Option<cuda::KeptRows>,
    #[cfg(feature = "cuda")]
    logits: cuda::KeptLogits,
}

/// Gradients with respect to the arguments to [`LinearLogProb`], in their shapes, without a graph.
///
/// `None` for an argument that is neither a variable nor computed from one.
#[derive(Debug, Clone)]
pub struct LinearGradients {
    /// Hidden state gradient, in their dtype.
    pub hidden: Option<Tensor>,
    /// Weight gradient, f32 (f64 for f64), the dtype in which it is summed. `None` if it was added
    /// to a sum, see [`LinearLogProb::with_weight_sum`].
    pub weight: Option<Tensor>,
    /// Bias gradient, in its dtype.
    pub bias: Option<Tensor>,
}

impl LinearLogProb {
    /// Checks and stores the arguments to [`linear_log_prob`].
    ///
    /// # Errors
    ///
    /// Same as [`linear_log_prob`].
    pub fn new(
        hidden: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<Self> {
        let layer = Self {
            arguments: Arguments::new(hidden, weight, bias, targets, temperature, options)?,
            wanted: Wanted {
                hidden: hidden.track_op(),
                weight: weight.track_op(),
                bias: bias.is_some_and(Tensor::track_op),
            },
            weight_sum: None,
            #[cfg(feature = "cuda")]
            kept: None,
            #[cfg(feature = "cuda")]
            logits: cuda::KeptLogits::default(),
        };
        // The CPU path skips masked rows without copying the others.
        #[cfg(feature = "cuda")]
        if hidden.device().is_cuda() && layer.arguments.is_fused() {
            return layer.without_dropped_rows();
        }
        Ok(layer)
    }

    /// Returns the same layer restricted to the unmasked rows.
    #[cfg(feature = "cuda")]
    fn without_dropped_rows(self) -> Result<Self> {
        let Some(kept) = self.arguments.rows.mask.as_ref().map(cuda::KeptRows::new) else {
            return Ok(self);
        };
        let Some(kept) = kept? else {
            return Ok(self);
        };
        let Arguments { hidden, rows, .. } = &self.arguments;
        let (n, width) = rows_and_width(hidden.layout());
        Ok(Self {
            arguments: Arguments {
                hidden: kept.select(&hidden.reshape((n, width))?, 0)?,
                rows: Rows {
                    targets: kept.select(&rows.targets, 0)?,
                    mask: None,
                    ..rows.clone()
                },
                ..self.arguments
            },
            kept: Some(kept),
            logits: self.logits,
            wanted: self.wanted,
            weight_sum: self.weight_sum,
        })
    }

    /// Lets [`Self::backward`] add the weight gradient to `sum` in place. A gradient that is summed
    /// over several batches then needs no memory for each batch's part.
    ///
    /// `sum` is `[V, H]`, contiguous, f32 (f64 for f64). Tensors that share its memory change, too.
    ///
    /// # Errors
    ///
    /// Fails if the weight is a constant, or if the shape, dtype or device of `sum` does not match.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use candle_grpo_kernels::{LinearLogProb, LogProbOptions};
    ///
    /// let hidden = Tensor::ones((3, 8), DType::F32, &Device::Cpu)?;
    /// let weight = Var::ones((5, 8), DType::F32, &Device::Cpu)?;
    /// let targets = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
    /// let sum = Tensor::zeros((5, 8), DType::F32, &Device::Cpu)?;
    /// for _ in 0..2 {
    ///     let options = LogProbOptions::default();
    ///     let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, options)?;
    ///     let layer = layer.with_weight_sum(&sum)?;
    ///     let tokens = layer.forward()?;
    ///     let gradients = layer.backward(&tokens, &tokens)?;
    ///     assert!(gradients.weight.is_none());
    /// }
    /// assert!(sum.abs()?.max_all()?.to_scalar::<f32>()? > 0.);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_weight_sum(self, sum: &Tensor) -> Result<Self> {
        let weight = &self.arguments.weight;
        if !self.wanted.weight {
            bail!("sum: given for a constant weight, must be absent");
        }
        check::accumulator("sum", sum, weight.dtype())?;
        if sum.dims() != weight.dims() {
            bail!(
                "sum: shape {:?}, must be that of weight, {:?}",
                sum.dims(),
                weight.dims()
            );
        }
        check::same_device(&[("weight", weight), ("sum", sum)])?;
        check::apart("sum", &[sum], &[weight, &self.arguments.hidden])?;
        Ok(Self {
            weight_sum: Some(sum.detach()),
            ..self
        })
    }

    /// Returns the same results as [`linear_log_prob`], without a graph.
    ///
    /// On CUDA this keeps up to 2^29 logits, 2 GiB, for one call to [`Self::backward`], which
    /// recomputes the others.
    ///
    /// # Errors
    ///
    /// Fails if the device fails.
    pub fn forward(&self) -> Result<TokenLogProbs> {
        self.compute(self.arguments.detach())
    }

    /// Computes the results for checked arguments. Detached arguments record no graph.
    fn compute(&self, arguments: Arguments) -> Result<TokenLogProbs> {
        if !arguments.is_fused() {
            return composed::unchecked(arguments);
        }
        let bias = arguments.wide_bias()?;
        let Arguments {
            hidden,
            weight,
            rows,
            outer,
            ..
        } = arguments;
        let op = self.op(rows);
        let packed = match &bias {
            Some(bias) => hidden.apply_op3(&weight, bias, op)?,
            None => hidden.apply_op2(&weight, op)?,
        };
        TokenLogProbs::unpack(&self.spread(packed, 1)?, &outer)
    }

    fn op(&self, rows: Rows) -> Op {
        Op {
            rows,
            wanted: self.wanted,
            weight_sum: self.weight_sum.clone(),
            #[cfg(feature = "cuda")]
            logits: self.logits.clone(),
        }
    }

    /// Selects the layer's rows from `x`, which has all rows, along `dim`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn select(&self, x: Tensor, dim: usize) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(kept) = &self.kept {
            return kept.select(&x, dim);
        }
        Ok(x)
    }

    /// Expands `x`, which has the layer's rows, to all rows along `dim`. The others are 0.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn spread(&self, x: Tensor, dim: usize) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(kept) = &self.kept {
            return kept.spread(&x, dim);
        }
        Ok(x)
    }

    /// Returns a scalar's gradients.
    ///
    /// `tokens` is the result from [`Self::forward`]. `derivatives` are the scalar's derivatives
    /// with respect to each result, in the shape of the targets.
    ///
    /// # Errors
    ///
    /// Fails if shapes do not match.
    pub fn backward(
        &self,
        tokens: &TokenLogProbs,
        derivatives: &TokenLogProbs,
    ) -> Result<LinearGradients> {
        let arguments = self.arguments.detach();
        let packed = self.select(tokens.pack("tokens", &arguments.outer)?, 1)?;
        let gradient = derivatives.pack("derivatives", &arguments.outer)?.detach();
        let gradient = self.select(gradient, 1)?;
        let hidden_shape = self.arguments.hidden_shape();
        let gradients = if arguments.is_fused() {
            let bias = arguments.wide_bias()?;
            self.op(arguments.rows).gradients(
                &arguments.hidden,
                &arguments.weight,
                bias.as_ref(),
                &packed,
                &gradient,
            )?
        } else {
            let mut gradients = composed_gradients(arguments, self.wanted, &gradient)?;
            if let Some(sum) = &self.weight_sum
                && let Some(weight) = gradients[1].take()
            {
                let total = (sum + weight.to_dtype(sum.dtype())?)?;
                sum.slice_set(&total, 0, 0)?;
            }
            gradients
        };
        let [hidden, weight, bias] = gradients;
        let bias_dtype = self.arguments.bias.as_ref().map(Tensor::dtype);
        Ok(LinearGradients {
            hidden: hidden
                .map(|x| self.spread(x, 0)?.reshape(hidden_shape))
                .transpose()?,
            weight: weight
                .map(|x| x.to_dtype(arithmetic_dtype(x.dtype())))
                .transpose()?,
            bias: bias
                .zip(bias_dtype)
                .map(|(x, dtype)| x.to_dtype(dtype))
                .transpose()?,
        })
    }
}

/// Returns the gradients from the composed twin.
fn composed_gradients(
    arguments: Arguments,
    wanted: Wanted,
    gradient: &Tensor,
) -> Result<[Option<Tensor>; 3]> {
    let variable = |wanted: bool, x: &Tensor| wanted.then(|| Var::from_tensor(x)).transpose();
    let hidden = variable(wanted.hidden, &arguments.hidden)?;
    let weight = variable(wanted.weight, &arguments.weight)?;
    let bias = match &arguments.bias {
        Some(bias) => variable(wanted.bias, bias)?,
        None => None,
    };
    let or =
        |variable: &Option<Var>, x: Tensor| variable.as_ref().map_or(x, |v| v.as_tensor().clone());
    let outer = arguments.outer.clone();
    let tokens = composed::unchecked(Arguments {
        hidden: or(&hidden, arguments.hidden),
        weight: or(&weight, arguments.weight),
        bias: arguments.bias.map(|x| or(&bias, x)),
        ..arguments
    })?;
    let store = (tokens.pack("tokens", &outer)? * gradient)?
        .sum_all()?
        .backward()?;
    let found = |variable: Option<Var>| match variable {
        None => Ok(None),
        Some(variable) => match store.get(&variable) {
            Some(gradient) => Ok(Some(gradient.detach())),
            None => variable.zeros_like().map(Some),
        },
    };
    Ok([found(hidden)?, found(weight)?, found(bias)?])
}

/// Checked arguments to [`linear_log_prob`].
#[derive(Clone)]
pub(crate) struct Arguments {
    /// `[.., H]`, contiguous; N rows.
    pub(crate) hidden: Tensor,
    /// `[V, H]`, contiguous.
    pub(crate) weight: Tensor,
    /// `[V]`, contiguous.
    pub(crate) bias: Option<Tensor>,
    pub(crate) rows: Rows,
    pub(crate) temperature: f64,
    /// Result shape.
    pub(crate) outer: Vec<usize>,
}

impl Arguments {
    pub(crate) fn new(
        hidden: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        targets: &Tensor,
        temperature: f64,
        options: LogProbOptions,
    ) -> Result<Self> {
        for (name, tensor) in [
            ("hidden", Some(hidden)),
            ("weight", Some(weight)),
            ("bias", bias),
        ] {
            if let Some(tensor) = tensor {
                check::float(name, tensor)?;
                check::same_device(&[("hidden", hidden), (name, tensor)])?;
            }
        }
        let &[vocab, width] = weight.dims() else {
            bail!("weight: shape {:?}, must be [V, H]", weight.dims());
        };
        if vocab == 0 || width == 0 {
            bail!("weight: shape {:?}, must not be empty", weight.dims());
        }
        let Some((&last, outer)) = hidden.dims().split_last() else {
            bail!("hidden: a scalar, must be [.., {width}]");
        };
        if last != width {
            bail!(
                "hidden: shape {:?}, the last dimension must be that of weight, {width}",
                hidden.dims()
            );
        }
        if let Some(bias) = bias
            && bias.dims() != [vocab]
        {
            bail!("bias: shape {:?}, must be [{vocab}]", bias.dims());
        }
        Ok(Self {
            rows: Rows::new(
                ("hidden", hidden),
                outer,
                vocab,
                targets,
                temperature,
                options,
            )?,
            temperature,
            outer: outer.to_vec(),
            hidden: hidden.contiguous()?,
            weight: weight.contiguous()?,
            bias: bias.map(Tensor::contiguous).transpose()?,
        })
    }

    /// Returns the arguments without graphs.
    fn detach(&self) -> Self {
        Self {
            hidden: self.hidden.detach(),
            weight: self.weight.detach(),
            bias: self.bias.as_ref().map(Tensor::detach),
            rows: self.rows.clone(),
            temperature: self.temperature,
            outer: self.outer.clone(),
        }
    }

    /// Returns whether a fused path exists. The CUDA path has no cap. Without rows none is needed,
    /// and Candle's operations would fail.
    fn is_fused(&self) -> bool {
        let has_cap = self.rows.logit_cap.is_none()
            || self.hidden.device().is_cpu()
            || self.hidden.elem_count() == 0;
        has_cap && path::is_fused(&self.hidden) && path::is_fused(&self.weight)
    }

    /// Returns the bias in f32.
    fn wide_bias(&self) -> Result<Option<Tensor>> {
        self.bias
            .as_ref()
            .map(|bias| bias.to_dtype(DType::F32))
            .transpose()
    }

    fn hidden_shape(&self) -> Vec<usize> {
        [self.outer.as_slice(), &[self.weight.dims()[1]]].concat()
    }
}

/// The arguments that need a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) hidden: bool,
    pub(crate) weight: bool,
    pub(crate) bias: bool,
}

/// Maps hidden states `[.., H]`, the weight `[V, H]` and an optional f32 bias `[V]` to f32
/// `[3, N]`. The inputs are contiguous.
struct Op {
    rows: Rows,
    /// Arguments that need a gradient. The backward pass only sees detached arguments.
    wanted: Wanted,
    /// See [`LinearLogProb::weight_sum`].
    weight_sum: Option<Tensor>,
    #[cfg(feature = "cuda")]
    logits: cuda::KeptLogits,
}

impl Op {
    /// Returns the gradients with respect to hidden states, weight and bias, without a graph.
    /// Weight and bias gradients are f32. There is no weight gradient if it has been added to the
    /// sum. `packed` is the forward result and `gradient` its gradient, `[3, N]`.
    fn gradients(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        packed: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let (hidden, weight) = (&hidden.detach(), &weight.detach());
        let bias = &bias.map(Tensor::detach);
        let bias = bias.as_ref();
        let pass = Backward {
            rows: &self.rows,
            packed: packed.detach(),
            gradient: gradient.contiguous()?,
        };
        #[cfg(feature = "cuda")]
        if hidden.device().is_cuda() {
            let wanted = (self.wanted, self.weight_sum.as_ref());
            return cuda::backward(hidden, weight, bias, &pass, wanted, &self.logits);
        }
        let kept = Kept::new(&self.rows)?;
        let (hidden_storage, hidden_layout) = hidden.storage_and_layout();
        let hidden_storage = slice::on_cpu(&hidden_storage)?;
        let (weight_storage, weight_layout) = weight.storage_and_layout();
        let bias = bias.map(Tensor::storage_and_layout);
        let bias = bias
            .as_ref()
            .map(|(storage, layout)| floats(slice::on_cpu(storage)?, layout))
            .transpose()?;
        let (vocab, width) = weight.dims2()?;
        let states = with_floats!(hidden_storage, "hidden", hidden => {
            kept.states(&hidden[slice::range(hidden_layout)?], width, weight.dtype())
        });
        with_floats!(slice::on_cpu(&weight_storage)?, "weight", values => {
            let layer = Layer {
                hidden: &states,
                weight: &values[slice::range(weight_layout)?],
                bias,
                vocab,
                width,
                logit_cap: self.rows.logit_cap,
            };
            let backward = |sum: Option<&mut [f32]>| {
                cpu::backward(&layer, &kept, &pass, self.wanted, sum)
            };
            let gradients = match &self.weight_sum {
                None => backward(None)?,
                Some(sum) => slice::write_f32(sum, |sum| backward(Some(sum)))?,
            };
            let tensor = |x, shape: &Shape| Tensor::from_vec(x, shape, &Device::Cpu);
            Ok([
                self.wanted
                    .hidden
                    .then(|| tensor(gradients.hidden, hidden.shape())?.to_dtype(hidden.dtype()))
                    .transpose()?,
                (self.wanted.weight && self.weight_sum.is_none())
                    .then(|| tensor(gradients.weight, weight.shape()))
                    .transpose()?,
                self.wanted
                    .bias
                    .then(|| tensor(gradients.bias, &Shape::from(vocab)))
                    .transpose()?,
            ])
        })
    }

    /// Returns the storage for the logits, if there will be a backward pass.
    #[cfg(feature = "cuda")]
    fn kept_logits(&self) -> Option<&cuda::KeptLogits> {
        let Wanted {
            hidden,
            weight,
            bias,
        } = self.wanted;
        (hidden || weight || bias).then_some(&self.logits)
    }

    fn forward_on_cpu(
        &self,
        (hidden, hidden_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, _) = rows_and_width(hidden_layout);
        let (vocab, width) = weight_layout.shape().dims2()?;
        let kept = Kept::new(&self.rows)?;
        let hidden = with_floats!(hidden, "hidden", hidden => {
            kept.states(&hidden[slice::range(hidden_layout)?], width, weight.dtype())
        });
        let bias = bias
            .map(|(storage, layout)| floats(storage, layout))
            .transpose()?;
        let packed = with_floats!(weight, "weight", weight => {
            let layer = Layer {
                hidden: &hidden,
                weight: &weight[slice::range(weight_layout)?],
                bias,
                vocab,
                width,
                logit_cap: self.rows.logit_cap,
            };
            cpu::forward(&layer, &kept, &self.rows)?
        });
        Ok((CpuStorage::F32(packed), Shape::from((3, rows))))
    }
}

/// Returns a contiguous f32 tensor's entries.
fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    Ok(&storage.as_slice::<f32>()?[slice::range(layout)?])
}

impl CustomOp2 for Op {
    fn name(&self) -> &'static str {
        "linear_log_prob"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward_on_cpu((hidden, hidden_layout), (weight, weight_layout), None)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        hidden: &candle_core::CudaStorage,
        hidden_layout: &Layout,
        weight: &candle_core::CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(
            (hidden, hidden_layout),
            (weight, weight_layout),
            None,
            &self.rows,
            self.kept_logits(),
        )
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        packed: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dtype = weight.dtype();
        let [hidden, weight, _] = self.gradients(hidden, weight, None, packed, gradient)?;
        Ok((hidden, weight.map(|x| x.to_dtype(dtype)).transpose()?))
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "linear_log_prob"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward_on_cpu(
            (hidden, hidden_layout),
            (weight, weight_layout),
            Some((bias, bias_layout)),
        )
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        hidden: &candle_core::CudaStorage,
        hidden_layout: &Layout,
        weight: &candle_core::CudaStorage,
        weight_layout: &Layout,
        bias: &candle_core::CudaStorage,
        bias_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(
            (hidden, hidden_layout),
            (weight, weight_layout),
            Some((bias, bias_layout)),
            &self.rows,
            self.kept_logits(),
        )
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        packed: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dtype = weight.dtype();
        let [hidden, weight, bias] =
            self.gradients(hidden, weight, Some(bias), packed, gradient)?;
        Ok((hidden, weight.map(|x| x.to_dtype(dtype)).transpose()?, bias))
    }
}
