//! Gates for the gated delta rule.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::precision::arithmetic_dtype;
use crate::{check, sigmoid};

/// Gates for [`gated_delta_rule`](crate::gated_delta_rule()) as in Qwen3-Next and Qwen3.5:
/// `g = -exp(a_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`. Returns `g` and `beta`.
///
/// All arguments get gradients. Arithmetic is in f32. On CUDA this takes one launch if no argument
/// is in a graph and all have the same dtype. Otherwise it is plain Candle operations, because the
/// arguments are small compared with the rule's.
///
/// # Shapes
///
/// - `a`, `b`: `[N, value_heads]`, any float dtype
/// - `a_log`, `dt_bias`: `[value_heads]`, any float dtype
/// - results: `[N, value_heads]`, f32 (f64 if `a` is f64)
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::delta_gates;
///
/// let zero = Tensor::new(&[[0f32]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0f32], &Device::Cpu)?;
/// let (g, beta) = delta_gates(&zero, &zero, &bias, &bias)?;
/// assert!((g.to_vec2::<f32>()?[0][0] + 2f32.ln()).abs() < 1e-6);
/// assert_eq!(beta.to_vec2::<f32>()?, [[0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn delta_gates(
    a: &Tensor,
    b: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let inputs = [a, b, a_log, dt_bias];
    check(inputs)?;
    #[cfg(feature = "cuda")]
    if is_fused_on_cuda(inputs) && !inputs.iter().any(|x| x.track_op()) {
        let inputs = contiguous(inputs)?;
        return cuda::forward(inputs.each_ref());
    }
    Wide::new(inputs)?.gates()
}

/// Computes the backward pass for [`delta_gates`], without a graph.
///
/// `gradients` are with respect to `g` and `beta`. Returns the gradients with respect to `a`, `b`,
/// `a_log` and `dt_bias`, in their shapes and dtypes.
///
/// # Errors
///
/// Same as [`delta_gates`]. Also fails if the gradients do not have the shape and dtype of its
/// results.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::delta_gates_gradient;
///
/// let zero = Tensor::new(&[[0f32]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0f32], &Device::Cpu)?;
/// let one = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let [a, b, ..] = delta_gates_gradient([&zero, &zero, &bias, &bias], [&one, &one])?;
/// assert_eq!((a.to_vec2::<f32>()?[0][0], b.to_vec2::<f32>()?[0][0]), (-0.5, 0.25));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn delta_gates_gradient(inputs: [&Tensor; 4], gradients: [&Tensor; 2]) -> Result<[Tensor; 4]> {
    let inputs = inputs.map(Tensor::detach);
    let [a, b, a_log, dt_bias] = inputs.each_ref();
    check(inputs.each_ref())?;
    for (name, gradient) in [
        ("gradients[0]", gradients[0]),
        ("gradients[1]", gradients[1]),
    ] {
        let wide = arithmetic_dtype(a.dtype());
        if (gradient.dims(), gradient.dtype()) != (a.dims(), wide) {
            bail!(
                "{name}: shape {:?} of {:?}, must be {:?} of {wide:?}, as the result",
                gradient.dims(),
                gradient.dtype(),
                a.dims()
            );
        }
        check::same_device(&[("a", a), (name, gradient)])?;
    }
    let [of_g, of_beta] = gradients.map(Tensor::detach);
    #[cfg(feature = "cuda")]
    if is_fused_on_cuda(inputs.each_ref()) {
        let inputs = contiguous(inputs.each_ref())?;
        return cuda::backward(
            inputs.each_ref(),
            [&of_g.contiguous()?, &of_beta.contiguous()?],
        );
    }
    let wide = Wide::new(inputs.each_ref())?;
    let (g, beta) = wide.gates()?;
    let of_x = (of_g.broadcast_mul(&wide.rate)?.neg()? * sigmoid(&wide.x)?)?;
    let of_b = (of_beta * (&beta * (1.0 - &beta)?)?)?;
    Ok([
        of_x.to_dtype(a.dtype())?,
        of_b.to_dtype(b.dtype())?,
        (of_g * g)?.sum(0)?.to_dtype(a_log.dtype())?,
        of_x.sum(0)?.to_dtype(dt_bias.dtype())?,
    ])
}

fn check([a, b, a_log, dt_bias]: [&Tensor; 4]) -> Result<()> {
    let inputs = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)];
    for (name, x) in inputs {
        check::float(name, x)?;
    }
    let &[rows, heads] = a.dims() else {
        bail!("a: shape {:?}, must be [N, value_heads]", a.dims());
    };
    if b.dims() != [rows, heads] {
        bail!("b: shape {:?}, must be that of a, {:?}", b.dims(), a.dims());
    }
    for (name, x) in &inputs[2..] {
        if x.dims() != [heads] {
            bail!(
                "{name}: shape {:?}, must be [{heads}], the last dimension of a",
                x.dims()
            );
        }
    }
    check::same_device(&inputs)
}

#[cfg(feature = "cuda")]
fn is_fused_on_cuda(inputs: [&Tensor; 4]) -> bool {
    let [a, ..] = inputs;
    a.device().is_cuda()
        && crate::path::is_fused(a)
        && a.elem_count() > 0
        && inputs.iter().all(|x| x.dtype() == a.dtype())
}

#[cfg(feature = "cuda")]
fn contiguous([a, b, a_log, dt_bias]: [&Tensor; 4]) -> Result<[Tensor; 4]> {
    Ok([
        a.contiguous()?,
        b.contiguous()?,
        a_log.contiguous()?,
        dt_bias.contiguous()?,
    ])
}

/// The arguments in the arithmetic dtype.
struct Wide {
    /// `a + dt_bias`
    x: Tensor,
    b: Tensor,
    /// `exp(a_log)`
    rate: Tensor,
}

impl Wide {
    fn new([a, b, a_log, dt_bias]: [&Tensor; 4]) -> Result<Self> {
        let wide = arithmetic_dtype(a.dtype());
        Ok(Self {
            x: a.to_dtype(wide)?.broadcast_add(&dt_bias.to_dtype(wide)?)?,
            b: b.to_dtype(wide)?,
            rate: a_log.to_dtype(wide)?.exp()?,
        })
    }

    /// `g` and `beta`.
    fn gates(&self) -> Result<(Tensor, Tensor)> {
        let x = &self.x;
        // softplus without overflow. Its gradient is exact, also at 0.
        let rest = (x.abs()?.neg()?.exp()? + 1.0)?.log()?;
        let softplus = (x.relu()? + rest)?;
        let g = softplus.broadcast_mul(&self.rate)?.neg()?;
        Ok((g, sigmoid(&self.b)?))
    }
}
