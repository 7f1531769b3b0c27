//! Mean and variance over selected entries, in two passes and relative to the smallest entry. Equal
//! entries have variance exactly 0, and a large offset costs no precision.

use candle_core::{D, Result, Tensor};

/// Moments along the last dimension, over the entries where `selected` is 1.
#[derive(Debug, Clone)]
pub(crate) struct Moments {
    /// Number of selected entries, `[.., 1]`.
    pub(crate) count: Tensor,
    /// Their mean, `[.., 1]`; 0 if none is selected.
    pub(crate) mean: Tensor,
    /// The entries minus their mean, 0 where not selected. Has the input's shape.
    pub(crate) centered: Tensor,
    /// Sum of squares over `centered`, `[.., 1]`.
    squares: Tensor,
    /// 1 where all selected entries are equal, u8, `[.., 1]`.
    pub(crate) constant: Tensor,
}

impl Moments {
    /// Computes the moments of `x`, in the statistics dtype, where `selected` (u8, the same shape)
    /// is 1.
    pub(crate) fn new(x: &Tensor, selected: &Tensor) -> Result<Self> {
        let zeros = x.zeros_like()?;
        let count = selected.to_dtype(x.dtype())?.sum_keepdim(D::Minus1)?;
        let none = count.eq(0.)?;
        let smallest = selected
            .where_cond(x, &(&zeros + f64::INFINITY)?)?
            .min_keepdim(D::Minus1)?;
        let smallest = none.where_cond(&smallest.zeros_like()?, &smallest)?;
        let shifted = selected.where_cond(&x.broadcast_sub(&smallest)?, &zeros)?;
        let sum = shifted.sum_keepdim(D::Minus1)?;
        let shifted_mean = (&sum / count.maximum(1.)?)?;
        let centered = selected.where_cond(&shifted.broadcast_sub(&shifted_mean)?, &zeros)?;
        // NaN makes the sum NaN. CUDA's minima and maxima drop it.
        let constant = sum.eq(0.)?;
        // Rounding may move the mean away from entries that are all equal.
        let centered = constant
            .broadcast_as(x.shape())?
            .where_cond(&zeros, &centered)?;
        Ok(Self {
            mean: (smallest + shifted_mean)?,
            squares: centered.sqr()?.sum_keepdim(D::Minus1)?,
            count,
            centered,
            constant,
        })
    }

    /// Returns the variance with denominator `count - ddof`, or 0 where that is not positive.
    pub(crate) fn variance(&self, ddof: usize) -> Result<Tensor> {
        let denominator = (&self.count - ddof as f64)?;
        let defined = denominator.gt(0.)?;
        defined.where_cond(
            &(&self.squares / denominator.maximum(1.)?)?,
            &self.squares.zeros_like()?,
        )
    }

    /// Returns the summed squared deviations, `[.., 1]`.
    pub(crate) fn sum_of_squares(&self) -> &Tensor {
        &self.squares
    }

    /// Returns the square root of [`Self::variance`].
    pub(crate) fn std(&self, ddof: usize) -> Result<Tensor> {
        self.variance(ddof)?.sqrt()
    }
}

/// Computes `x / (std + epsilon)`, or 0 where that would be 0 / 0. `std` broadcasts to `x`.
pub(crate) fn divide_by_std(x: &Tensor, std: &Tensor, epsilon: f64) -> Result<Tensor> {
    let denominator = (std + epsilon)?;
    let vanishes = denominator.eq(0.)?;
    let denominator = vanishes.where_cond(&denominator.ones_like()?, &denominator)?;
    x.broadcast_div(&denominator)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use candle_grpo_test_support::{devices, numbers};

    #[test]
    fn nan_reaches_the_moments_of_its_row_only() -> Result<()> {
        let nan = f64::NAN;
        for device in devices() {
            let x = Tensor::new(&[[1., nan, 1.], [1., 3., 5.], [nan; 3], [2.; 3]], device)?;
            let moments = Moments::new(&x, &x.ones_like()?.to_dtype(DType::U8)?)?;
            let (mean, std) = (numbers(&moments.mean)?, numbers(&moments.std(1)?)?);
            let centered = numbers(&moments.centered)?;
            for row in [0, 2] {
                assert!(mean[row].is_nan() && std[row].is_nan());
                assert!(centered[3 * row..][..3].iter().all(|x| x.is_nan()));
            }
            assert_eq!((mean[1], mean[3]), (3., 2.));
            assert_eq!((std[1], std[3]), (2., 0.));
            assert_eq!(centered[3..6], [-2., 0., 2.]);
            assert_eq!(centered[9..], [0.; 3]);
            assert_eq!(numbers(&moments.constant)?, [0., 0., 0., 1.]);
        }
        Ok(())
    }
}
