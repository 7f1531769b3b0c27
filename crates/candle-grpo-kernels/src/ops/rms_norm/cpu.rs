//! The CPU path of [`rms_norm`](crate::rms_norm()).

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::RmsNorm;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{LaneSums, padded};
use crate::cpu::{output, slice};

/// Maximum number of row groups. The weight gradient is summed over the rows in a group, then over
/// the groups in order, so it is bit-identical on any number of threads.
const GROUPS: usize = 64;

impl RmsNorm {
    /// Returns the factors for the normalized elements in f32, padded.
    fn factors<T: Element>(&self, weight: &[T]) -> Vec<f32> {
        let mut factors = padded(weight);
        for factor in &mut factors[..weight.len()] {
            *factor += self.options.offset();
        }
        factors
    }
}

/// Normalizes the rows in `x` `[N, H]`.
pub(crate) fn forward<T: Element>(x: &[T], weight: &[T], norm: &RmsNorm) -> Vec<T> {
    let width = weight.len();
    let factors = norm.factors(weight);
    let fill = |y: &mut [MaybeUninit<T>]| {
        y.par_chunks_exact_mut(width)
            .zip(x.par_chunks_exact(width))
            .for_each_init(
                || vec![0.0; factors.len()],
                |buffer, (y, x)| {
                    vectors().dispatch(ForwardRow {
                        x,
                        factors: &factors,
                        norm,
                        y,
                        buffer,
                    });
                },
            );
    };
    // SAFETY: the rows cover the result, and each row is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(x.len(), fill)
    }
}

/// Returns the gradients with respect to `x` and `weight`, in their shapes.
pub(crate) fn backward<T: Element>(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    norm: &RmsNorm,
) -> Result<(Tensor, Tensor)> {
    let (x_gradient, weight_gradient) = slice::read::<T, _>(x, |x| {
        slice::read::<T, _>(weight, |weight| {
            slice::read::<T, _>(gradient, |gradient| {
                Ok(backward_rows(x, weight, gradient, norm))
            })
        })
    })?;
    Ok((
        Tensor::from_vec(x_gradient, x.shape(), &Device::Cpu)?,
        Tensor::from_vec(weight_gradient, weight.shape(), &Device::Cpu)?,
    ))
}

fn backward_rows<T: Element>(
    x: &[T],
    weight: &[T],
    gradient: &[T],
    norm: &RmsNorm,
) -> (Vec<T>, Vec<T>) {
    let width = weight.len();
    let factors = norm.factors(weight);
    let group = (x.len() / width).div_ceil(GROUPS).max(1) * width;
    let mut partial_sums = Vec::new();
    let fill = |x_gradient: &mut [MaybeUninit<T>]| {
        partial_sums = x_gradient
            .par_chunks_mut(group)
            .zip(x.par_chunks(group).zip(gradient.par_chunks(group)))
            .map(|(x_gradient, (x, gradient))| {
                let mut weight_gradient = vec![0.0; factors.len()];
                let mut buffers = vec![0.0; 2 * factors.len()];
                let rows = x_gradient
                    .chunks_exact_mut(width)
                    .zip(x.chunks_exact(width).zip(gradient.chunks_exact(width)));
                for (x_gradient, (x, gradient)) in rows {
                    vectors().dispatch(BackwardRow {
                        x,
                        factors: &factors,
                        gradient,
                        norm,
                        x_gradient,
                        weight_gradient: &mut weight_gradient,
                        buffers: &mut buffers,
                    });
                }
                weight_gradient
            })
            .collect();
    };
    // SAFETY: the groups cover the result, the rows in a group cover the group, and each row is
    // written completely.
    #[allow(unsafe_code)]
    let x_gradient = unsafe { output::filled(x.len(), fill) };
    let mut weight_gradient = vec![0.0; factors.len()];
    for partial_sum in partial_sums {
        for (sum, part) in weight_gradient.iter_mut().zip(partial_sum) {
            *sum += part;
        }
    }
    let weight_gradient = weight_gradient[..width]
        .iter()
        .map(|&value| T::nearest(value))
        .collect();
    (x_gradient, weight_gradient)
}

/// Forward pass for a row. `factors` and `buffer` are padded, and `buffer` is 0 beyond the row.
struct ForwardRow<'a, T> {
    x: &'a [T],
    factors: &'a [f32],
    norm: &'a RmsNorm,
    y: &'a mut [MaybeUninit<T>],
    buffer: &'a mut [f32],
}

impl<T: Element> WithSimd for ForwardRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.x.len();
        T::widen(self.x, &mut self.buffer[..width]);
        let (vectors, _) = S::as_simd_f32s(self.buffer);
        let mut squares = LaneSums::<S>::zeros(simd);
        for x in vectors.chunks_exact(LaneSums::<S>::PARTS) {
            for part in 0..LaneSums::<S>::PARTS {
                squares.parts[part] = simd.mul_add_e_f32s(x[part], x[part], squares.parts[part]);
            }
        }
        let mean = squares.total(simd) / width as f32;
        let scale = (mean + self.norm.options.epsilon as f32).sqrt().recip();
        let rows = self.y.iter_mut().zip(&*self.buffer).zip(self.factors);
        if self.norm.options.is_offset {
            for ((y, &x), &factor) in rows {
                y.write(T::nearest(x * scale * factor));
            }
            return;
        }
        for ((y, &x), &factor) in rows {
            y.write(T::nearest(T::nearest(x * scale).wide() * factor));
        }
    }
}

/// Backward pass for a row. `factors`, `weight_gradient` and each half of `buffers` are padded, and
/// `buffers` is 0 beyond the row.
struct BackwardRow<'a, T> {
    x: &'a [T],
    factors: &'a [f32],
    gradient: &'a [T],
    norm: &'a RmsNorm,
    x_gradient: &'a mut [MaybeUninit<T>],
    weight_gradient: &'a mut [f32],
    buffers: &'a mut [f32],
}

impl<T: Element> WithSimd for BackwardRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.x.len();
        let (x, gradient) = self.buffers.split_at_mut(self.factors.len());
        T::widen(self.x, &mut x[..width]);
        T::widen(self.gradient, &mut gradient[..width]);
        // A row with NaN leaves NaN in the padding, which the next row would sum.
        gradient[width..].fill(0.0);

        let (x_vectors, _) = S::as_simd_f32s(x);
        let (gradient_vectors, _) = S::as_mut_simd_f32s(gradient);
        let (factor_vectors, _) = S::as_simd_f32s(self.factors);
        let (weight_gradient, _) = S::as_mut_simd_f32s(self.weight_gradient);

        let (mut squares, mut products) = (LaneSums::<S>::zeros(simd), LaneSums::<S>::zeros(simd));
        let parts = LaneSums::<S>::PARTS;
        for ((x, gradient), factor) in x_vectors
            .chunks_exact(parts)
            .zip(gradient_vectors.chunks_exact(parts))
            .zip(factor_vectors.chunks_exact(parts))
        {
            for part in 0..parts {
                let x = x[part];
                squares.parts[part] = simd.mul_add_e_f32s(x, x, squares.parts[part]);
                let along = simd.mul_f32s(gradient[part], factor[part]);
                products.parts[part] = simd.mul_add_e_f32s(along, x, products.parts[part]);
            }
        }
        let mean = squares.total(simd) / width as f32;
        let scale = (mean + self.norm.options.epsilon as f32).sqrt().recip();
        // dx = scale g - x scale^3 mean(g x), where g is the gradient times the factor.
        let along_x = -scale * scale * scale * products.total(simd) / width as f32;

        let (scale, along_x) = (simd.splat_f32s(scale), simd.splat_f32s(along_x));
        let rows = x_vectors.iter().zip(gradient_vectors);
        for ((&x, gradient), (&factor, sum)) in rows.zip(factor_vectors.iter().zip(weight_gradient))
        {
            let scaled = simd.mul_f32s(*gradient, scale);
            *sum = simd.mul_add_e_f32s(scaled, x, *sum);
            *gradient = simd.mul_add_e_f32s(scaled, factor, simd.mul_f32s(x, along_x));
        }
        T::write(&gradient[..width], self.x_gradient);
    }
}
