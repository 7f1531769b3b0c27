//! Causal depthwise convolution.

pub(crate) mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
use crate::{PrefixTree, check, graph, path};

/// Causal depthwise convolution and silu: `silu(sum_k weight[k] x[t - (taps - 1) + k])` in each
/// channel. The last tap is the current row.
///
/// Rows before a sequence are 0. Rows in a shared prefix are computed once, and precede each
/// branch. `x` and `weight` get gradients. Arithmetic is in f32.
///
/// # Shapes
///
/// - `x`: `[N, channels]`, any float dtype; the result has its shape and dtype
/// - `weight`: `[channels, taps]`, the same dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{PrefixTree, causal_conv};
///
/// // Two sequences of one channel. Each row is added to 10 times the row before it.
/// let x = Tensor::new(&[[20f32], [30.], [40.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[10f32, 1.]], &Device::Cpu)?;
/// let y = causal_conv(&x, &weight, &PrefixTree::new(&[2, 1])?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[20.], [230.], [40.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn causal_conv(x: &Tensor, weight: &Tensor, tree: &PrefixTree) -> Result<Tensor> {
    check(x, weight, tree)?;
    if !path::is_fused(x) {
        return composed::unchecked(x, weight, tree);
    }
    let op = CausalConv { tree: tree.clone() };
    x.contiguous()?.apply_op2(&weight.contiguous()?, op)
}

/// Computes the backward pass for [`causal_conv`], without a graph.
///
/// `gradient` is the gradient with respect to the result. Returns the gradients with respect to `x`
/// and `weight`.
///
/// # Errors
///
/// Same as [`causal_conv`]. Also fails if `gradient` does not have the shape and dtype of `x`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{PrefixTree, causal_conv_gradient};
///
/// // The derivative of silu is 1 at large values.
/// let x = Tensor::new(&[[20f32], [30.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[10f32, 1.]], &Device::Cpu)?;
/// let gradient = Tensor::new(&[[0f32], [1.]], &Device::Cpu)?;
/// let tree = PrefixTree::new(&[2])?;
/// let (x_gradient, weight_gradient) = causal_conv_gradient(&x, &weight, &tree, &gradient)?;
/// assert_eq!(x_gradient.to_vec2::<f32>()?, [[10.], [1.]]);
/// assert_eq!(weight_gradient.to_vec2::<f32>()?, [[20., 30.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn causal_conv_gradient(
    x: &Tensor,
    weight: &Tensor,
    tree: &PrefixTree,
    gradient: &Tensor,
) -> Result<(Tensor, Tensor)> {
    check(x, weight, tree)?;
    check::gradient(gradient, "x", x)?;
    if !path::is_fused(x) {
        let [x_gradient, weight_gradient] =
            graph::gradients([x, weight], gradient, |[x, weight]| {
                composed::unchecked(x, weight, tree)
            })?;
        return Ok((x_gradient, weight_gradient));
    }
    let op = CausalConv { tree: tree.clone() };
    op.gradients(&x.contiguous()?, &weight.contiguous()?, gradient)
}

pub(crate) fn check(x: &Tensor, weight: &Tensor, tree: &PrefixTree) -> Result<()> {
    tree.check_rows("x", check_weight(x, weight)?)
}

/// Checks `x` and `weight`, and returns the number of rows.
pub(crate) fn check_weight(x: &Tensor, weight: &Tensor) -> Result<usize> {
    check::float("x", x)?;
    let &[rows, channels] = x.dims() else {
        bail!("x: shape {:?}, must be [N, channels]", x.dims());
    };
    if !matches!(*weight.dims(), [same, taps] if same == channels && channels > 0 && taps > 0) {
        bail!(
            "weight: shape {:?}, must be [{channels}, taps], the channels of x, and not empty",
            weight.dims()
        );
    }
    check::same_dtype("weight", weight, "x", x)?;
    check::same_device(&[("x", x), ("weight", weight)])?;
    Ok(rows)
}

/// The convolution on contiguous `x` `[N, channels]` and `weight` `[channels, taps]`.
pub(crate) struct CausalConv {
    pub(crate) tree: PrefixTree,
}

impl CausalConv {
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
            return cuda::backward(x, weight, &gradient, &self.tree);
        }
        with_element!(x.dtype(), "x", T => {
            cpu::backward::<T>(x, weight, &gradient, self)
        })
    }
}

impl CustomOp2 for CausalConv {
    fn name(&self) -> &'static str {
        "causal_conv"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x_range, weight_range) = (slice::range(x_layout)?, slice::range(weight_layout)?);
        let (_, channels) = x_layout.shape().dims2()?;
        let y = with_floats!(x, "x", x => {
            let weight = &weight.as_slice()?[weight_range];
            let y = cpu::forward(&x[x_range], weight, channels, self);
            WithDType::to_cpu_storage_owned(y)
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
        cuda::forward((x, x_layout), (weight, weight_layout), &self.tree)
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
