//! The sigmoid.

use candle_core::{Result, Tensor};

use crate::check;
use crate::precision::arithmetic_dtype;

/// `1 / (1 + exp(-x))`, the gate for attention and the gated delta rule in Qwen3.5.
///
/// `x` can have any shape and float dtype. The result has the same, and `x` gets a gradient.
/// Arithmetic is in f32, in plain Candle operations.
///
/// # Errors
///
/// Fails for other dtypes.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::sigmoid;
///
/// let x = Tensor::new(&[-1e9f32, 0., 1e9], &Device::Cpu)?;
/// assert_eq!(sigmoid(&x)?.to_vec1::<f32>()?, [0., 0.5, 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    check::float("x", x)?;
    let wide = x.to_dtype(arithmetic_dtype(x.dtype()))?;
    (wide.neg()?.exp()? + 1.0)?.recip()?.to_dtype(x.dtype())
}
