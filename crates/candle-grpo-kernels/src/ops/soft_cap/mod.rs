//! Logit soft caps.

pub(crate) mod cpu;

use candle_core::{Result, Tensor};

use crate::check;
use crate::precision::arithmetic_dtype;

/// `cap * tanh(x / cap)`, which is between `-cap` and `cap` (Gemma 2,
/// <https://arxiv.org/abs/2408.00118>), or `x` if `cap` is `None`.
///
/// `x` can have any shape and float dtype. The result has the same, and `x` gets a gradient.
/// Arithmetic is in f32, in plain Candle operations.
///
/// # Errors
///
/// Fails for other dtypes, or if the cap is not positive and finite.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::soft_cap;
///
/// let x = Tensor::new(&[0f32, 1., 1e9], &Device::Cpu)?;
/// let y = soft_cap(&x, 2.0)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 2. * 0.5f32.tanh()).abs() < 1e-6 && y[2] == 2.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn soft_cap(x: &Tensor, cap: impl Into<Option<f64>>) -> Result<Tensor> {
    check::float("x", x)?;
    let Some(cap) = cap.into() else {
        return Ok(x.clone());
    };
    check::positive("cap", cap)?;
    let wide = x.to_dtype(arithmetic_dtype(x.dtype()))?;
    ((wide / cap)?.tanh()? * cap)?.to_dtype(x.dtype())
}
