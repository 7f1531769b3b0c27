//! Rotary position embedding.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_floats};
use crate::precision::arithmetic_dtype;
use crate::{check, path};

/// Rotary position embedding (<https://arxiv.org/abs/2104.09864>) in the half-split layout that
/// Hugging Face transformers uses.
///
/// In each head with D elements, elements i and i + D / 2 form a pair, rotated by the position's
/// angle i. `x` gets a gradient; `cos` and `sin` do not. Arithmetic is in f32.
///
/// # Shapes
///
/// - `x`: `[.., heads * D]`, any float dtype, with the heads side by side; the result has its shape
///   and dtype
/// - `cos`, `sin`: `[.., D / 2]` with the leading dimensions of `x`, f32 (f64 for f64), shared by
///   the heads
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::rope;
///
/// // A position with two heads of two elements, rotated by a right angle.
/// let x = Tensor::new(&[[1f32, 0., 2., 3.]], &Device::Cpu)?;
/// let cos = Tensor::new(&[[0f32]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// assert_eq!(rope(&x, &cos, &sin)?.to_vec2::<f32>()?, [[0., 1., -3., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    check(x, cos, sin)?;
    rotate(x, cos, sin, false)
}

/// Computes the backward pass for [`rope`], without a graph: rotates the result's gradient back.
///
/// # Errors
///
/// Same as [`rope`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{rope, rope_gradient};
///
/// let x = Tensor::new(&[[3f32, 4.]], &Device::Cpu)?;
/// let cos = Tensor::new(&[[0.6f32]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[0.8f32]], &Device::Cpu)?;
/// let back = rope_gradient(&cos, &sin, &rope(&x, &cos, &sin)?)?.to_vec2::<f32>()?;
/// assert!((back[0][0] - 3.).abs() < 1e-6 && (back[0][1] - 4.).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope_gradient(cos: &Tensor, sin: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    check(gradient, cos, sin)?;
    rotate(&gradient.detach(), cos, sin, true)
}

/// Applies [`rope`], or with `back` its inverse, to checked arguments.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, back: bool) -> Result<Tensor> {
    if path::is_fused(x) {
        return x.contiguous()?.apply_op1(Rope::new(cos, sin, back)?);
    }
    let sin = if back { sin.neg()? } else { sin.clone() };
    composed::unchecked(x, cos, &sin)
}

/// Computes the cosine and sine `[N, pairs]` of `positions` times `inverse_frequencies`, each
/// multiplied by `factor`, for [`rope`].
///
/// # Shapes
///
/// - `positions`: N numbers in any shape and dtype
/// - `inverse_frequencies`: `[1, pairs]`, f32 or f64, which is also the result dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::rope_angles;
///
/// let positions = Tensor::new(&[0u32, 2], &Device::Cpu)?;
/// let frequencies = Tensor::new(&[[0.5f32]], &Device::Cpu)?;
/// let (cos, sin) = rope_angles(&positions, &frequencies, 1.0)?;
/// assert_eq!(cos.to_vec2::<f32>()?, [[1.], [1f32.cos()]]);
/// assert_eq!(sin.to_vec2::<f32>()?, [[0.], [1f32.sin()]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope_angles(
    positions: &Tensor,
    inverse_frequencies: &Tensor,
    factor: f64,
) -> Result<(Tensor, Tensor)> {
    check::one_stream(positions.device())?;
    let dtype = inverse_frequencies.dtype();
    if !matches!(inverse_frequencies.dims(), [1, _]) || !matches!(dtype, DType::F32 | DType::F64) {
        bail!(
            "inverse_frequencies: {:?} of {dtype:?}, must be [1, pairs] of F32 or F64",
            inverse_frequencies.dims()
        );
    }
    check::same_device(&[
        ("positions", positions),
        ("inverse_frequencies", inverse_frequencies),
    ])?;
    #[cfg(feature = "cuda")]
    if positions.device().is_cuda() && positions.dtype() == DType::U32 && dtype == DType::F32 {
        return cuda::angles(
            &positions.contiguous()?,
            &inverse_frequencies.contiguous()?,
            factor as f32,
        );
    }
    let positions = positions.to_dtype(dtype)?.reshape(((), 1))?;
    let angles = positions.broadcast_mul(inverse_frequencies)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    if factor == 1.0 {
        return Ok((cos, sin));
    }
    Ok(((cos * factor)?, (sin * factor)?))
}

pub(crate) fn check(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    check::float("x", x)?;
    let width = check::width("x", x)?;
    let pairs = check::width("cos", cos)?;
    let (leading, angle_leading) = (&x.dims()[..x.rank() - 1], &cos.dims()[..cos.rank() - 1]);
    if leading != angle_leading || width % (2 * pairs) != 0 {
        bail!(
            "cos: shape {:?}, must be [.., D / 2] for x of [.., heads * D], which is {:?}",
            cos.dims(),
            x.dims()
        );
    }
    if sin.dims() != cos.dims() {
        bail!(
            "sin: shape {:?}, must be that of cos, {:?}",
            sin.dims(),
            cos.dims()
        );
    }
    for (name, angles) in [("cos", cos), ("sin", sin)] {
        if angles.dtype() != arithmetic_dtype(x.dtype()) {
            bail!(
                "{name}: {:?}, must be {:?} for x of {:?}",
                angles.dtype(),
                arithmetic_dtype(x.dtype()),
                x.dtype()
            );
        }
    }
    check::same_device(&[("x", x), ("cos", cos), ("sin", sin)])
}

/// The rotation of a contiguous `x` `[.., heads * D]`.
pub(crate) struct Rope {
    /// f32 `[.., D / 2]`, contiguous, like `sin`.
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
    /// Rotates by the negative angles, for the gradient.
    pub(crate) back: bool,
}

impl Rope {
    fn new(cos: &Tensor, sin: &Tensor, back: bool) -> Result<Self> {
        Ok(Self {
            cos: cos.detach().contiguous()?,
            sin: sin.detach().contiguous()?,
            back,
        })
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, width) = (
            slice::range(layout)?,
            layout.dims()[layout.dims().len() - 1],
        );
        let y = with_floats!(x, "x", x => {
            WithDType::to_cpu_storage_owned(cpu::rotate(&x[range], width, self)?)
        });
        Ok((y, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        Ok((cuda::rotate(x, layout, self)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let back = Self {
            cos: self.cos.clone(),
            sin: self.sin.clone(),
            back: !self.back,
        };
        gradient.contiguous()?.apply_op1_no_bwd(&back).map(Some)
    }
}
