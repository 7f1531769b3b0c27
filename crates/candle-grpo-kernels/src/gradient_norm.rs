//! The norm of gradients, and their scaling.

use candle_core::{DType, Result, Tensor, bail};

use crate::{check, composed, cpu, path};

/// The sum of the squares of each gradient, `[n]` on the device of the gradients: the square root of their sum is the
/// norm of all together.
///
/// Gradients may be of any float dtype and shape. Squares and sums are in f64 (f32 on Metal, which has none), so that
/// nothing overflows that f32 can hold. The order of the sums does not depend on the number of threads.
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
        return cpu::gradient_norm::squared_norms(gradients);
    }
    #[cfg(feature = "cuda")]
    if gradients.iter().all(|x| path::is_fused(x)) {
        return crate::cuda::gradient_norm::squared_norms(gradients);
    }
    composed::squared_gradient_norms_of(gradients)
}

/// Multiplies all gradients by `factor`, in place: what shares their memory changes too.
///
/// Errs on gradients that are not contiguous or share memory with one another; then nothing has changed. The sum of
/// gradients over micro-batches, clipped by their global norm:
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
        // Candle takes an empty tensor for one whose elements share memory.
        .filter(|gradient| gradient.elem_count() > 0)
        .partition(|x| path::is_fused_on_cpu(x));
    cpu::gradient_norm::scale(&fused, factor as f32)?;
    #[cfg(feature = "cuda")]
    let rest = {
        let (fused, rest): (Vec<&Tensor>, Vec<_>) = rest.iter().partition(|x| path::is_fused(x));
        fused
            .into_iter()
            .try_for_each(|x| crate::cuda::gradient_norm::scale(x, factor as f32))?;
        rest
    };
    composed::scale_gradients_by(&rest, factor)
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

/// The dtype of the sums.
pub(crate) fn sum_dtype(gradient: &Tensor) -> DType {
    if gradient.device().is_metal() {
        DType::F32
    } else {
        DType::F64
    }
}
