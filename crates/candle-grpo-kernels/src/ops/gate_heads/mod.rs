//! Gates for the attention output.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::ops::head_transform::heads_of;
use crate::{check, sigmoid};

/// `x * sigmoid(gate)` for each head, the gate for the attention output in Qwen3-Next and Qwen3.5.
/// Each query head in `query` is followed by its gate, as the query map of these models returns
/// them.
///
/// `x` and `query` get gradients. Arithmetic is in f32. On CUDA this takes one launch if neither is
/// in a graph. [`HeadTransform::gradients`](crate::HeadTransform::gradients) includes the gates'
/// gradient. That for `x` is `gate_heads` of the result's gradient.
///
/// # Shapes
///
/// - `x`: `[N, heads * head_dim]`, any float dtype; the result has its shape and dtype
/// - `query`: `[N, heads * 2 * head_dim]`, the same dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::gate_heads;
///
/// // Two heads with two elements. The gates are 0 and 1e9.
/// let x = Tensor::new(&[[2f32, 4., 6., 8.]], &Device::Cpu)?;
/// let query = Tensor::new(&[[1f32, 1., 0., 0., 1., 1., 1e9, 1e9]], &Device::Cpu)?;
/// assert_eq!(gate_heads(&x, &query, 2)?.to_vec2::<f32>()?, [[1., 2., 6., 8.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gate_heads(x: &Tensor, query: &Tensor, head_dim: usize) -> Result<Tensor> {
    check::float("x", x)?;
    check::same_dtype("query", query, "x", x)?;
    check::same_device(&[("x", x), ("query", query)])?;
    let &[n, width] = x.dims() else {
        bail!("x: shape {:?}, must be [N, heads * head_dim]", x.dims());
    };
    if head_dim == 0 || !width.is_multiple_of(head_dim) {
        bail!("head_dim: {head_dim}, must be positive and divide the width of x, {width}");
    }
    if query.dims() != [n, 2 * width] {
        bail!(
            "query: shape {:?}, must be [{n}, {}], with a gate for each head of x",
            query.dims(),
            2 * width
        );
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && crate::path::is_fused(x) && !x.track_op() && !query.track_op() {
        return cuda::gate(&x.contiguous()?, &query.contiguous()?, head_dim);
    }
    x * sigmoid(&half(query, head_dim, 1)?)?
}

/// Returns the gradient with respect to the gates in `query`, `[N, heads * head_dim]`, given that
/// for the result of [`gate_heads`], without a graph.
pub(crate) fn gates_gradient(
    x: &Tensor,
    query: &Tensor,
    head_dim: usize,
    gradient: &Tensor,
) -> Result<Tensor> {
    let sigmoid = sigmoid(&half(&query.detach(), head_dim, 1)?)?;
    // The derivative of s is s (1 - s).
    let slope = (&sigmoid * (1.0 - &sigmoid)?)?;
    (gradient.detach() * x.detach())? * slope
}

/// Returns the first or second half of each head in `[N, heads * 2 * head_dim]`.
pub(crate) fn half(x: &Tensor, head_dim: usize, index: usize) -> Result<Tensor> {
    let (n, width) = x.dims2()?;
    let half = heads_of(x, 2 * head_dim)?.narrow(2, index * head_dim, head_dim)?;
    half.contiguous()?.reshape((n, width / 2))
}

/// Inverts [`half`].
pub(crate) fn join(halves: [&Tensor; 2], head_dim: usize) -> Result<Tensor> {
    let (n, width) = halves[0].dims2()?;
    let [first, second] = halves.map(|half| heads_of(half, head_dim));
    Tensor::cat(&[first?, second?], 2)?.reshape((n, 2 * width))
}
