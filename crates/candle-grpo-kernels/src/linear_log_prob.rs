//! Log-probs of tokens from hidden states and the output weight.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, Var, bail};

use crate::cpu::linear_log_prob::{Kept, Layer, Wanted};
use crate::cpu::with_floats;
use crate::log_prob::{Backward, LogProbOptions, Rows, TokenLogProbs, rows_and_width};
use crate::{check, composed, cpu, path};

/// [`log_prob`](crate::log_prob) of `logits = hidden weight^T + bias`, which are never held: `hidden` `[.., H]`,
/// `weight` `[V, H]`, `bias` `[V]`, `targets` integers `[..]` below V.
///
/// The logits are made in tiles of a few MiB (on CUDA a few hundred), forward and again backward: what a backward pass takes
/// is the memory of the gradients, that of hidden states in f32 until it is rounded, and at most 24 MiB. What needs no gradient
/// (weights that are frozen, hidden states that are a constant) costs no product for it; nor does a row that the mask
/// drops, whose gradient is 0 (on CUDA the others are copied, for which the mask is read on the host). Products are taken in f32 (f64 for f64 hidden states, from whole logits) whatever the
/// dtypes are; on CUDA those of two bf16 or f16 arguments are taken as they are and added in f32, and the gradients of
/// the logits are rounded to bf16 if both are. The same arguments give the same bits on any number of cores.
/// [`LogProbOptions::gradient_into_logits`] means nothing here.
///
/// Candle's `backward` adds every gradient to a tensor of zeros, which takes the memory of a second weight;
/// [`LinearLogProb`] does not.
///
/// Errs on other shapes and dtypes, a temperature that is not positive and finite, and targets that are out of range
/// (checked on the CPU only, as in [`log_prob`](crate::log_prob)).
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
    let LinearLogProb {
        arguments,
        kept,
        wanted,
    } = LinearLogProb::new(hidden, weight, bias, targets, temperature, options)?;
    if !arguments.is_fused() {
        return composed::linear_log_prob_rows(arguments);
    }
    let bias = arguments.bias_or_empty()?;
    let Arguments {
        hidden,
        weight,
        rows,
        outer,
        ..
    } = arguments;
    let packed = hidden.apply_op3(&weight, &bias, Op { rows, wanted })?;
    TokenLogProbs::unpack(&spread(kept.as_ref(), packed, 1)?, &outer)
}

/// [`linear_log_prob`] with its backward pass in the caller's hands, for losses of which no graph is needed.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_grpo_kernels::{LinearLogProb, LogProbOptions, TokenLogProbs};
///
/// let hidden = Tensor::ones((3, 8), DType::F32, &Device::Cpu)?;
/// let weight = Var::ones((5, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
/// let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, LogProbOptions::default())?;
/// let tokens = layer.forward()?;
/// // The loss is the mean of the negative log-probs.
/// let derivatives = TokenLogProbs {
///     log_probs: Tensor::new(&[-1f32 / 3.; 3], &Device::Cpu)?,
///     entropy: tokens.entropy.zeros_like()?,
///     log_sum_exp: tokens.log_sum_exp.zeros_like()?,
/// };
/// let gradients = layer.backward(&tokens, &derivatives)?;
/// assert!(gradients.hidden.is_none()); // a constant
/// assert_eq!(gradients.weight.expect("a variable has one").dims(), [5, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct LinearLogProb {
    /// Those of the rows in `kept`, if there is such.
    arguments: Arguments,
    kept: Option<KeptRows>,
    wanted: Wanted,
}

/// The gradients of the arguments of a [`LinearLogProb`], of their shape and dtype, without a graph; none for an
/// argument that is neither a variable nor computed from one.
#[derive(Debug, Clone)]
pub struct LinearGradients {
    /// Of the hidden states.
    pub hidden: Option<Tensor>,
    /// Of the weight.
    pub weight: Option<Tensor>,
    /// Of the bias.
    pub bias: Option<Tensor>,
}

impl LinearLogProb {
    /// Takes and checks the arguments of [`linear_log_prob`].
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
            kept: None,
            wanted: Wanted {
                hidden: hidden.track_op(),
                weight: weight.track_op(),
                bias: bias.is_some_and(Tensor::track_op),
            },
        };
        // The CPU path leaves out the other rows by itself, and without a copy of these.
        if hidden.device().is_cuda() && layer.arguments.is_fused() {
            layer.without_dropped_rows()
        } else {
            Ok(layer)
        }
    }

    /// The same, computed of rows that the mask keeps alone.
    fn without_dropped_rows(self) -> Result<Self> {
        let Some(kept) = self.arguments.rows.mask.as_ref().map(KeptRows::new) else {
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
                    inverse_temperature: rows.inverse_temperature,
                },
                ..self.arguments
            },
            kept: Some(kept),
            wanted: self.wanted,
        })
    }

    /// What [`linear_log_prob`] gives, without a graph.
    pub fn forward(&self) -> Result<TokenLogProbs> {
        let arguments = self.arguments.detach();
        if !arguments.is_fused() {
            return composed::linear_log_prob_rows(arguments);
        }
        let packed = arguments.hidden.apply_op3_no_bwd(
            &arguments.weight,
            &arguments.bias_or_empty()?,
            &Op {
                rows: arguments.rows,
                wanted: self.wanted,
            },
        )?;
        let packed = spread(self.kept.as_ref(), packed, 1)?;
        TokenLogProbs::unpack(&packed, &arguments.outer)
    }

    /// The gradients of a scalar whose derivatives by the results of [`Self::forward`], `tokens`, are known; they have
    /// the shape of the targets.
    pub fn backward(
        &self,
        tokens: &TokenLogProbs,
        derivatives: &TokenLogProbs,
    ) -> Result<LinearGradients> {
        let arguments = self.arguments.detach();
        let mut packed = tokens.pack("tokens", &arguments.outer)?.detach();
        let mut gradient = derivatives.pack("derivatives", &arguments.outer)?.detach();
        if let Some(kept) = &self.kept {
            packed = kept.select(&packed, 1)?;
            gradient = kept.select(&gradient, 1)?;
        }
        let hidden_shape = self.arguments.hidden_shape();
        let gradients = if arguments.is_fused() {
            let bias = arguments.bias_or_empty()?;
            let op = Op {
                rows: arguments.rows,
                wanted: self.wanted,
            };
            op.gradients(
                &arguments.hidden,
                &arguments.weight,
                &bias,
                packed,
                gradient,
            )?
        } else {
            composed_gradients(arguments, self.wanted, &gradient)?
        };
        let [hidden, weight, bias] = gradients;
        let bias_dtype = self.arguments.bias.as_ref().map(Tensor::dtype);
        Ok(LinearGradients {
            hidden: hidden
                .map(|x| spread(self.kept.as_ref(), x, 0)?.reshape(hidden_shape))
                .transpose()?,
            weight,
            bias: bias
                .zip(bias_dtype)
                .map(|(x, dtype)| x.to_dtype(dtype))
                .transpose()?,
        })
    }
}

/// By the composed twin, whose graph ends here.
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
    let tokens = composed::linear_log_prob_rows(Arguments {
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

/// The rows that a mask keeps, where they are computed as a tensor of their own.
struct KeptRows {
    /// u32 `[K]`
    indices: Tensor,
    /// How many rows there are with the others.
    among: usize,
}

impl KeptRows {
    /// None if `mask`, u8 `[N]`, keeps all, or nothing: no tensor on a GPU is empty. Waits for the device.
    fn new(mask: &Tensor) -> Result<Option<Self>> {
        let indices: Vec<u32> = (0..)
            .zip(mask.to_vec1::<u8>()?)
            .filter_map(|(row, is_kept)| (is_kept != 0).then_some(row))
            .collect();
        let among = mask.elem_count();
        if indices.is_empty() || indices.len() == among {
            return Ok(None);
        }
        Ok(Some(Self {
            indices: Tensor::new(indices, mask.device())?,
            among,
        }))
    }

    /// These rows of `x`, along `dim`.
    fn select(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        x.index_select(&self.indices, dim)
    }
}

/// `x`, that of the rows in `kept` if there is such, among zeros for the others.
fn spread(kept: Option<&KeptRows>, x: Tensor, dim: usize) -> Result<Tensor> {
    let Some(KeptRows { indices, among }) = kept else {
        return Ok(x);
    };
    let mut shape = x.dims().to_vec();
    shape[dim] = *among;
    Tensor::zeros(shape, x.dtype(), x.device())?.index_add(indices, &x, dim)
}

/// The arguments of [`linear_log_prob`], checked.
pub(crate) struct Arguments {
    /// `[.., H]`, contiguous: N rows.
    pub(crate) hidden: Tensor,
    /// `[V, H]`, contiguous.
    pub(crate) weight: Tensor,
    /// `[V]`, contiguous.
    pub(crate) bias: Option<Tensor>,
    pub(crate) rows: Rows,
    pub(crate) temperature: f64,
    /// The shape of the results.
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
            bail!("weight: shape {:?} is empty", weight.dims());
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

    /// The same without graphs.
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

    fn is_fused(&self) -> bool {
        path::is_fused(&self.hidden) && path::is_fused(&self.weight)
    }

    /// The bias in f32. If there is none, it has no entries; on CUDA, where no memory is empty, one of 0.
    fn bias_or_empty(&self) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => bias.to_dtype(DType::F32),
            None => {
                let device = self.hidden.device();
                Tensor::zeros(usize::from(device.is_cuda()), DType::F32, device)
            }
        }
    }

    fn hidden_shape(&self) -> Vec<usize> {
        [self.outer.as_slice(), &[self.weight.dims()[1]]].concat()
    }
}

/// Hidden states `[.., H]`, weight `[V, H]` and bias, f32 `[V]` or `[0]`, to f32 `[3, N]`.
struct Op {
    rows: Rows,
    /// What an argument of the backward pass no longer says.
    wanted: Wanted,
}

impl Op {
    /// The gradients of hidden states, weight and bias, which are detached, from the result and its gradient `[3, N]`.
    fn gradients(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        packed: Tensor,
        gradient: Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let pass = Backward {
            rows: &self.rows,
            packed,
            gradient,
        };
        #[cfg(feature = "cuda")]
        if hidden.device().is_cuda() {
            let layer = [hidden, weight, bias];
            return crate::cuda::linear_log_prob::backward(layer, &pass, self.wanted);
        }
        let kept = Kept::new(&self.rows)?;
        let (hidden_storage, hidden_layout) = hidden.storage_and_layout();
        let hidden_storage = cpu::on_cpu(&hidden_storage)?;
        let (weight_storage, weight_layout) = weight.storage_and_layout();
        let (bias_storage, bias_layout) = bias.storage_and_layout();
        let (vocab, width) = weight.dims2()?;
        let states = with_floats!(hidden_storage, "hidden", hidden => {
            kept.states(&hidden[cpu::range(hidden_layout)?], width)
        });
        let found = |x, wanted: bool, shape: &Shape, dtype| match wanted {
            true => Tensor::from_vec(x, shape, &candle_core::Device::Cpu)?
                .to_dtype(dtype)
                .map(Some),
            false => Ok(None),
        };
        with_floats!(cpu::on_cpu(&weight_storage)?, "weight", values => {
            let layer = Layer {
                hidden: &states,
                weight: &values[cpu::range(weight_layout)?],
                bias: &cpu::on_cpu(&bias_storage)?.as_slice::<f32>()?[cpu::range(bias_layout)?],
                vocab,
                width,
            };
            let gradients = cpu::linear_log_prob::backward(&layer, &kept, &pass, self.wanted)?;
            let weight_gradient = self
                .wanted
                .weight
                .then(|| Tensor::from_vec(gradients.weight, weight.shape(), weight.device()))
                .transpose()?;
            Ok([
                found(gradients.hidden, self.wanted.hidden, hidden.shape(), hidden.dtype())?,
                weight_gradient,
                found(gradients.bias, self.wanted.bias, bias.shape(), DType::F32)?,
            ])
        })
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
        let (rows, _) = rows_and_width(hidden_layout);
        let (vocab, width) = weight_layout.shape().dims2()?;
        let kept = Kept::new(&self.rows)?;
        let hidden = with_floats!(hidden, "hidden", hidden => {
            kept.states(&hidden[cpu::range(hidden_layout)?], width)
        });
        let packed = with_floats!(weight, "weight", weight => {
            let layer = Layer {
                hidden: &hidden,
                weight: &weight[cpu::range(weight_layout)?],
                bias: &bias.as_slice::<f32>()?[cpu::range(bias_layout)?],
                vocab,
                width,
            };
            cpu::linear_log_prob::forward(&layer, &kept, &self.rows)?
        });
        Ok((CpuStorage::F32(packed), Shape::from((3, rows))))
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
        crate::cuda::linear_log_prob::forward(
            (hidden, hidden_layout),
            (weight, weight_layout),
            (bias, bias_layout),
            &self.rows,
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
        let [hidden, weight, bias] = self.gradients(
            &hidden.detach(),
            &weight.detach(),
            &bias.detach(),
            packed.detach(),
            gradient.contiguous()?,
        )?;
        Ok((hidden, weight, bias))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Numbers without a pattern, in [-0.5, 0.5).
    fn noise(shape: &[usize], dtype: DType) -> Result<Tensor> {
        let values: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|i| (i as f32 * 0.618_034).fract() - 0.5)
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
    }

    /// What GPUs are given, checked on the CPU, whose own path leaves rows out in another way: to the bit, and over several
    /// tiles of rows.
    #[test]
    fn dropped_rows_can_be_left_out_before() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let masks: [fn(u32) -> bool; 4] =
                [|row| row % 3 != 1, |row| row == 7, |_| false, |_| true];
            for keep in masks {
                let (rows, vocab, width) = (3100u32, 37, 5);
                let hidden = Var::from_tensor(&noise(&[31, 100, width], dtype)?)?;
                let weight = Var::from_tensor(&noise(&[vocab, width], dtype)?)?;
                let bias = Var::from_tensor(&noise(&[vocab], DType::F32)?)?;
                let targets = (0..rows).map(|row| row % vocab as u32);
                let targets = Tensor::from_iter(targets, &Device::Cpu)?.reshape((31, 100))?;
                let mask =
                    Tensor::from_iter((0..rows).map(|row| u8::from(keep(row))), &Device::Cpu)?
                        .reshape(targets.shape())?;
                let options = LogProbOptions {
                    mask: Some(&mask),
                    ..Default::default()
                };
                let new =
                    || LinearLogProb::new(&hidden, &weight, Some(&bias), &targets, 0.7, options);
                let (whole, compact) = (new()?, new()?.without_dropped_rows()?);
                let (expected, found) = (whole.forward()?, compact.forward()?);
                let flat = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                let same = |a: &Tensor, b: &Tensor| -> Result<()> {
                    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
                    assert_eq!(flat(a)?, flat(b)?);
                    Ok(())
                };
                same(&found.log_probs, &expected.log_probs)?;
                same(&found.entropy, &expected.entropy)?;
                same(&found.log_sum_exp, &expected.log_sum_exp)?;
                let derivatives = TokenLogProbs {
                    log_probs: noise(targets.dims(), DType::F32)?,
                    entropy: noise(targets.dims(), DType::F32)?,
                    log_sum_exp: noise(targets.dims(), DType::F32)?,
                };
                let expected = whole.backward(&expected, &derivatives)?;
                let found = compact.backward(&found, &derivatives)?;
                for (found, expected) in [
                    (found.hidden, expected.hidden),
                    (found.weight, expected.weight),
                    (found.bias, expected.bias),
                ] {
                    same(&found.expect("wanted"), &expected.expect("wanted"))?;
                }
            }
        }
        Ok(())
    }
}
