//! Gated activations for feed-forward layers.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
use crate::{check, graph, path};

/// SwiGLU (<https://arxiv.org/abs/2002.05202>): `silu(gate) * up` with
/// `silu(x) = x / (1 + exp(-x))`.
///
/// `gate`, `up` and the result have the same shape and float dtype. Both inputs get gradients.
/// Arithmetic is in f32.
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::swiglu;
///
/// let gate = Tensor::new(&[0f32, 1., -200.], &Device::Cpu)?;
/// let up = Tensor::new(&[5f32, 2., 3.], &Device::Cpu)?;
/// let y = swiglu(&gate, &up)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 2. / (1. + (-1f32).exp())).abs() < 1e-6 && y[2].abs() < 1e-30);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Activation::Silu)
}

/// Computes the backward pass for [`swiglu`], without a graph.
///
/// `gradient` is the gradient with respect to the result. Returns the gradients with respect to
/// `gate` and `up`.
///
/// # Errors
///
/// Same as [`swiglu`]. Also fails if `gradient` does not have the shape and dtype of `gate`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::swiglu_gradient;
///
/// let gate = Tensor::new(&[0f32], &Device::Cpu)?;
/// let up = Tensor::new(&[3f32], &Device::Cpu)?;
/// let (gate_gradient, up_gradient) = swiglu_gradient(&gate, &up, &gate.ones_like()?)?;
/// assert_eq!(gate_gradient.to_vec1::<f32>()?, [1.5]); // the derivative of silu at 0 is 1/2
/// assert_eq!(up_gradient.to_vec1::<f32>()?, [0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn swiglu_gradient(gate: &Tensor, up: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
    gated_gradient(gate, up, gradient, Activation::Silu)
}

/// GeGLU (<https://arxiv.org/abs/2002.05202>): `gelu(gate) * up`, with the approximation
/// `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, which is `gelu_pytorch_tanh`
/// in Hugging Face transformers.
///
/// Otherwise this is like [`swiglu`].
///
/// # Errors
///
/// Same as [`swiglu`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::geglu;
///
/// let gate = Tensor::new(&[0f32, 1., -200.], &Device::Cpu)?;
/// let up = Tensor::new(&[5f32, 2., 3.], &Device::Cpu)?;
/// let y = geglu(&gate, &up)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 2. * 0.841192).abs() < 1e-5 && y[2].abs() < 1e-30);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Activation::GeluTanh)
}

/// Computes the backward pass for [`geglu`], without a graph; see [`swiglu_gradient`].
///
/// # Errors
///
/// Same as [`swiglu_gradient`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::geglu_gradient;
///
/// let gate = Tensor::new(&[0f32], &Device::Cpu)?;
/// let up = Tensor::new(&[3f32], &Device::Cpu)?;
/// let (gate_gradient, up_gradient) = geglu_gradient(&gate, &up, &gate.ones_like()?)?;
/// assert_eq!(gate_gradient.to_vec1::<f32>()?, [1.5]); // the derivative of gelu at 0 is 1/2
/// assert_eq!(up_gradient.to_vec1::<f32>()?, [0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn geglu_gradient(gate: &Tensor, up: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
    gated_gradient(gate, up, gradient, Activation::GeluTanh)
}

/// The activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Silu,
    GeluTanh,
}

fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    check(gate, up)?;
    if !path::is_fused(gate) {
        return composed::unchecked(gate, up, activation);
    }
    gate.contiguous()?
        .apply_op2(&up.contiguous()?, Gated { activation })
}

fn gated_gradient(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
    activation: Activation,
) -> Result<(Tensor, Tensor)> {
    check(gate, up)?;
    check::gradient(gradient, "gate", gate)?;
    if !path::is_fused(gate) {
        let [gate_gradient, up_gradient] = graph::gradients([gate, up], gradient, |[gate, up]| {
            composed::unchecked(gate, up, activation)
        })?;
        return Ok((gate_gradient, up_gradient));
    }
    let op = Gated { activation };
    op.gradients(&gate.contiguous()?, &up.contiguous()?, gradient)
}

pub(crate) fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    check::float("gate", gate)?;
    if gate.dims() != up.dims() {
        bail!(
            "up: shape {:?}, must be that of gate, {:?}",
            up.dims(),
            gate.dims()
        );
    }
    check::same_dtype("up", up, "gate", gate)?;
    check::same_device(&[("gate", gate), ("up", up)])
}

/// The operation on contiguous `gate` and `up`.
struct Gated {
    activation: Activation,
}

impl Gated {
    /// Returns the gradients for contiguous inputs.
    fn gradients(&self, gate: &Tensor, up: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if gate.device().is_cuda() {
            return cuda::backward(gate, up, &gradient, self.activation);
        }
        with_element!(gate.dtype(), "gate", T => {
            cpu::backward::<T>(gate, up, &gradient, self.activation)
        })
    }
}

impl CustomOp2 for Gated {
    fn name(&self) -> &'static str {
        match self.activation {
            Activation::Silu => "swiglu",
            Activation::GeluTanh => "geglu",
        }
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gate_range, up_range) = (slice::range(gate_layout)?, slice::range(up_layout)?);
        let y = with_floats!(gate, "gate", gate => {
            let up = &up.as_slice()?[up_range];
            WithDType::to_cpu_storage_owned(cpu::forward(&gate[gate_range], up, self.activation))
        });
        Ok((y, gate_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        gate: &candle_core::CudaStorage,
        gate_layout: &Layout,
        up: &candle_core::CudaStorage,
        up_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(gate, gate_layout, up, up_layout, self.activation)
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (gate_gradient, up_gradient) = self.gradients(gate, up, gradient)?;
        Ok((Some(gate_gradient), Some(up_gradient)))
    }
}
