//! Recurrences from the last token to the first, on the device.

use candle_core::{D, Result, Tensor, bail};

/// `y[.., t] = input[.., t] + factor[.., t] * y[.., t + 1]` along the last dimension, where the value after the last
/// position is 0.
///
/// Discounted returns, generalised advantages and sums over runs of tokens are of this form. It is a scan by doubling:
/// after the step of width k, `y[t]` holds the terms of k positions, so it takes log2(T) passes instead of one for each
/// token. Differentiable. `input` and `factor` have the same shape and dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::reverse_recurrence;
///
/// let rewards = Tensor::new(&[[0f32, 0., 1.]], &Device::Cpu)?;
/// let discount = Tensor::full(0.5f32, (1, 3), &Device::Cpu)?;
/// let returns = reverse_recurrence(&rewards, &discount)?;
/// assert_eq!(returns.to_vec2::<f32>()?, [[0.25, 0.5, 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reverse_recurrence(input: &Tensor, factor: &Tensor) -> Result<Tensor> {
    if input.dims() != factor.dims() {
        bail!(
            "factor: shape {:?}, must be that of input, {:?}",
            factor.dims(),
            input.dims()
        );
    }
    let tokens = input.dim(D::Minus1)?;
    let (mut y, mut factor) = (input.clone(), factor.clone());
    let mut width = 1;
    while width < tokens {
        y = (&y + (&factor * shift_left(&y, width)?)?)?;
        factor = (&factor * shift_left(&factor, width)?)?;
        width *= 2;
    }
    Ok(y)
}

/// `x[.., t + by]`, and 0 beyond the end.
pub(crate) fn shift_left(x: &Tensor, by: usize) -> Result<Tensor> {
    let tokens = x.dim(D::Minus1)?;
    x.narrow(D::Minus1, by, tokens - by)?
        .pad_with_zeros(D::Minus1, 0, by)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::{assert_close, devices, numbers};

    #[test]
    fn equals_the_loop() -> Result<()> {
        let input: Vec<f64> = (0..7).map(|i| f64::from(i * i) - 9.).collect();
        let factor: Vec<f64> = (0..7).map(|i| 0.3 + 0.1 * f64::from(i)).collect();
        let mut expected = vec![0.; 7];
        let mut next = 0.;
        for t in (0..7).rev() {
            next = input[t] + factor[t] * next;
            expected[t] = next;
        }
        for device in devices() {
            let input = Tensor::new(input.as_slice(), device)?;
            let factor = Tensor::new(factor.as_slice(), device)?;
            let got = numbers(&reverse_recurrence(&input, &factor)?)?;
            assert_close(&got, &expected, 1e-12);
        }
        Ok(())
    }
}
