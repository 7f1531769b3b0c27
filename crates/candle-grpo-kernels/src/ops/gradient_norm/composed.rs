//! The composed twin of [`squared_gradient_norms`](crate::squared_gradient_norms) and
//! [`scale_gradients`](crate::scale_gradients).

use candle_core::{DType, Device, Result, Tensor};

use super::{check_arguments, check_scale, sum_dtype};

/// [`squared_gradient_norms`](crate::squared_gradient_norms) in plain Candle operations.
pub fn squared_gradient_norms(gradients: &[&Tensor]) -> Result<Tensor> {
    check_arguments(gradients)?;
    squared_norms_unchecked(gradients)
}

pub(crate) fn squared_norms_unchecked(gradients: &[&Tensor]) -> Result<Tensor> {
    if gradients.is_empty() {
        return Tensor::zeros(0, DType::F64, &Device::Cpu);
    }
    let sums = gradients
        .iter()
        .map(|gradient| {
            gradient
                .detach()
                .to_dtype(sum_dtype(gradient))?
                .sqr()?
                .sum_all()
        })
        .collect::<Result<Vec<_>>>()?;
    Tensor::stack(&sums, 0)
}

/// [`scale_gradients`](crate::scale_gradients) in plain Candle operations.
pub fn scale_gradients(gradients: &[&Tensor], factor: f64) -> Result<()> {
    check_scale(gradients, factor)?;
    scale_unchecked(gradients, factor)
}

pub(crate) fn scale_unchecked(gradients: &[&Tensor], factor: f64) -> Result<()> {
    for gradient in gradients
        .iter()
        .filter(|gradient| gradient.elem_count() > 0)
    {
        // A scalar has no dimension to set along.
        let flat = gradient.detach().flatten_all()?;
        flat.slice_set(&(&flat * factor)?, 0, 0)?;
    }
    Ok(())
}
