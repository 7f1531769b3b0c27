//! Gradient norms and scaling.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::{check, path};

/// Returns the sum of squares for each of n gradients, `[n]`. The square root of their total is the
/// global norm.
///
/// Gradients can have any float dtype and shape. Squares and sums are f64 (f32 on Metal), so finite
/// f32 gradients do not overflow. The result does not depend on the number of threads.
///
/// # Errors
///
/// Fails if a gradient does not have a float dtype, or if devices differ.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::squared_gradient_norms;
///
/// let (a, b) = (Tensor::new(&[3f32, 0.], &Device::Cpu)?, Tensor::new(&[[4f32]], &Device::Cpu)?);
/// assert_eq!(squared_gradient_norms(&[&a, &b])?.to_vec1::<f64>()?, [9., 16.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn squared_gradient_norms(gradients: &[&Tensor]) -> Result<Tensor> {
    check_arguments(gradients)?;
    if gradients.iter().all(|x| path::is_fused_on_cpu(x)) {
        return cpu::squared_norms(gradients);
    }
    #[cfg(feature = "cuda")]
    if gradients.iter().all(|x| path::is_fused(x)) {
        return cuda::squared_norms(gradients);
    }
    composed::squared_norms_unchecked(gradients)
}

/// Multiplies all gradients by `factor`, in place. Tensors that share their memory change too.
///
/// # Errors
///
/// Fails if a gradient is not contiguous or shares memory with another, or if `factor` is not
/// finite. In these cases nothing has changed.
///
/// # Examples
///
/// Clipping by the global norm:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{scale_gradients, squared_gradient_norms};
///
/// let (a, b) = (Tensor::new(&[3f32, 0.], &Device::Cpu)?, Tensor::new(&[[4f32]], &Device::Cpu)?);
/// let norm = squared_gradient_norms(&[&a, &b])?.sum_all()?.to_scalar::<f64>()?.sqrt();
/// scale_gradients(&[&a, &b], (1.0 / norm).min(1.0))?;
/// assert_eq!(a.to_vec1::<f32>()?, [0.6, 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn scale_gradients(gradients: &[&Tensor], factor: f64) -> Result<()> {
    check_scale(gradients, factor)?;
    let (fused, rest): (Vec<&Tensor>, Vec<_>) = gradients
        .iter()
        // Candle treats an empty tensor as one whose elements share memory.
        .filter(|gradient| gradient.elem_count() > 0)
        .partition(|x| path::is_fused_on_cpu(x));
    cpu::scale(&fused, factor as f32)?;
    #[cfg(feature = "cuda")]
    let rest = {
        let (fused, rest): (Vec<&Tensor>, Vec<_>) = rest.iter().partition(|x| path::is_fused(x));
        cuda::scale(&fused, factor as f32)?;
        rest
    };
    composed::scale_unchecked(&rest, factor)
}

pub(crate) fn check_arguments(gradients: &[&Tensor]) -> Result<()> {
    for gradient in gradients {
        check::float("gradients", gradient)?;
        check::same_device(&[("gradients", gradients[0]), ("gradients", gradient)])?;
    }
    Ok(())
}

pub(crate) fn check_scale(gradients: &[&Tensor], factor: f64) -> Result<()> {
    check_arguments(gradients)?;
    if !factor.is_finite() {
        bail!("factor: {factor}, must be finite");
    }
    if let Some(gradient) = gradients.iter().find(|gradient| !gradient.is_contiguous()) {
        bail!(
            "gradients: one of shape {:?} has the strides {:?}, must be contiguous",
            gradient.dims(),
            gradient.stride()
        );
    }
    check::apart("gradients", gradients, &[])
}

/// Returns the dtype of the sums.
pub(crate) fn sum_dtype(gradient: &Tensor) -> DType {
    if gradient.device().is_metal() {
        DType::F32
    } else {
        DType::F64
    }
}
