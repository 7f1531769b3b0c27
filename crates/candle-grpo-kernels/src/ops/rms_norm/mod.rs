//! Root mean square normalization.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
use crate::{check, graph, path};

/// Options of an RMSNorm. An epsilon converts to them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOptions {
    /// Positive and finite. Default 1e-6.
    pub epsilon: f64,
    /// The factor is `1 + weight`, as in Gemma and Qwen3.5. Default `false`.
    pub is_offset: bool,
}

impl RmsNormOptions {
    /// The number that is added to the weight.
    pub(crate) fn offset(self) -> f32 {
        f32::from(u8::from(self.is_offset))
    }
}

impl Default for RmsNormOptions {
    fn default() -> Self {
        1e-6.into()
    }
}

impl From<f64> for RmsNormOptions {
    fn from(epsilon: f64) -> Self {
        Self {
            epsilon,
            is_offset: false,
        }
    }
}

/// RMSNorm (<https://arxiv.org/abs/1910.07467>): `x / sqrt(mean(x^2) + epsilon) * weight`, with the
/// mean over the last dimension. `options` is the epsilon, or [`RmsNormOptions`].
///
/// `x` and `weight` get gradients. Arithmetic is in f32. For bf16 and f16 the normalized `x` is
/// rounded before it is multiplied by the weight, as for Llama in Hugging Face transformers. It is
/// not rounded if the factor is `1 + weight`, as for Gemma and Qwen3.5 there.
///
/// # Shapes
///
/// - `x`: `[.., H]`, any float dtype; the result has its shape and dtype
/// - `weight`: `[H]`, the same dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if epsilon is not positive and finite.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::rms_norm;
///
/// let x = Tensor::new(&[[3f32, 4.], [0., 0.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = rms_norm(&x, &weight, 1e-6)?.to_vec2::<f32>()?;
/// let scale = 12.5f32.sqrt();
/// assert!((y[0][0] - 3. / scale).abs() < 1e-5 && (y[0][1] - 8. / scale).abs() < 1e-5);
/// assert_eq!(y[1], [0., 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, options: impl Into<RmsNormOptions>) -> Result<Tensor> {
    let options = options.into();
    check(x, weight, options)?;
    if !is_fused(x) {
        return composed::unchecked(x, weight, options);
    }
    let op = RmsNorm { options };
    x.contiguous()?.apply_op2(&weight.contiguous()?, op)
}

/// Computes `sum = x + change` and its [`rms_norm`]. Returns both.
///
/// For bf16 and f16 the sum is rounded first. All arguments get gradients. On CUDA this takes one
/// launch if none of them is in a graph.
///
/// # Shapes
///
/// Same as [`rms_norm`]; `change` has the shape and dtype of `x`.
///
/// # Errors
///
/// Same as [`rms_norm`]. Also fails if `change` has a different shape or dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{add_rms_norm, rms_norm};
///
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let change = Tensor::new(&[[2f32, 2.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let (sum, y) = add_rms_norm(&x, &change, &weight, 1e-6)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[3., 4.]]);
/// assert_eq!(y.to_vec2::<f32>()?, rms_norm(&sum, &weight, 1e-6)?.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_rms_norm(
    x: &Tensor,
    change: &Tensor,
    weight: &Tensor,
    options: impl Into<RmsNormOptions>,
) -> Result<(Tensor, Tensor)> {
    let options = options.into();
    check(x, weight, options)?;
    check::same_shape("change", change, "x", x)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && is_fused(x) && ![x, change, weight].iter().any(|x| x.track_op()) {
        let (x, change) = (x.contiguous()?, change.contiguous()?);
        return cuda::add_forward(&x, &change, &weight.contiguous()?, &RmsNorm { options });
    }
    let sum = crate::add(x, change)?;
    let y = rms_norm(&sum, weight, options)?;
    Ok((sum, y))
}

/// Computes the backward pass for [`rms_norm`], without a graph.
///
/// `gradient` is the gradient with respect to the result. Returns the gradients with respect to `x`
/// and `weight`.
///
/// # Errors
///
/// Same as [`rms_norm`]. Also fails if `gradient` does not have the shape and dtype of `x`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::rms_norm_gradient;
///
/// // A row of one element is normalized to its sign.
/// let x = Tensor::new(&[[3f32], [-2.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[5f32], &Device::Cpu)?;
/// let (x_gradient, weight_gradient) = rms_norm_gradient(&x, &weight, 1e-12, &x.ones_like()?)?;
/// assert!(x_gradient.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// assert_eq!(weight_gradient.to_vec1::<f32>()?, [0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rms_norm_gradient(
    x: &Tensor,
    weight: &Tensor,
    options: impl Into<RmsNormOptions>,
    gradient: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let options = options.into();
    check(x, weight, options)?;
    check::gradient(gradient, "x", x)?;
    if !is_fused(x) {
        let [x_gradient, weight_gradient] =
            graph::gradients([x, weight], gradient, |[x, weight]| {
                composed::unchecked(x, weight, options)
            })?;
        return Ok((x_gradient, weight_gradient));
    }
    let op = RmsNorm { options };
    op.gradients(&x.contiguous()?, &weight.contiguous()?, gradient)
}

fn is_fused(x: &Tensor) -> bool {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && x.dims().last() > Some(&cuda::MAX_WIDTH) {
        return false;
    }
    path::is_fused(x)
}

pub(crate) fn check(x: &Tensor, weight: &Tensor, options: RmsNormOptions) -> Result<()> {
    check::positive("epsilon", options.epsilon)?;
    check::float("x", x)?;
    let width = check::width("x", x)?;
    if weight.dims() != [width] {
        bail!(
            "weight: shape {:?}, must be [{width}], the last dimension of x",
            weight.dims()
        );
    }
    check::same_dtype("weight", weight, "x", x)?;
    check::same_device(&[("x", x), ("weight", weight)])
}

/// The norm of contiguous `x` `[.., H]` with `weight` `[H]`.
pub(crate) struct RmsNorm {
    pub(crate) options: RmsNormOptions,
}

impl RmsNorm {
    /// Returns the gradients for contiguous inputs.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return cuda::backward(x, weight, &gradient, self);
        }
        with_element!(x.dtype(), "x", T => {
            cpu::backward::<T>(x, weight, &gradient, self)
        })
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x_range, weight_range) = (slice::range(x_layout)?, slice::range(weight_layout)?);
        let y = with_floats!(x, "x", x => {
            let weight = &weight.as_slice()?[weight_range];
            WithDType::to_cpu_storage_owned(cpu::forward(&x[x_range], weight, self))
        });
        Ok((y, x_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        x_layout: &Layout,
        weight: &candle_core::CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(x, x_layout, weight, weight_layout, self)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (x_gradient, weight_gradient) = self.gradients(x, weight, gradient)?;
        Ok((Some(x_gradient), Some(weight_gradient)))
    }
}
