//! The CPU path of [`embedding`](crate::embedding()).

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::{output, slice};

/// Returns the rows at `ids` in `weight` `[V, width]`.
pub(crate) fn forward<T: Element>(weight: &[T], width: usize, ids: &Tensor) -> Result<Vec<T>> {
    slice::read::<u32, _>(ids, |ids| {
        let fill = |rows: &mut [MaybeUninit<T>]| {
            rows.par_chunks_exact_mut(width)
                .zip(ids)
                .for_each(|(row, &id)| {
                    let source = &weight[id as usize * width..][..width];
                    for (value, &source) in row.iter_mut().zip(source) {
                        value.write(source);
                    }
                });
        };
        // SAFETY: the rows cover the result, and each row is written completely.
        #[allow(unsafe_code)]
        Ok(unsafe { output::filled(ids.len() * width, fill) })
    })
}

/// Returns the gradient with respect to `weight` `[V, H]`. In f32, rows without a token are not
/// written, so the system does not allocate them.
pub(crate) fn backward<T: Element>(
    weight: &Tensor,
    ids: &Tensor,
    gradient: &Tensor,
) -> Result<Tensor> {
    let (vocab, width) = weight.dims2()?;
    let mut weight_gradient = vec![T::zero(); vocab * width];
    add_rows::<T, T>(&mut weight_gradient, width, ids, gradient)?;
    Tensor::from_vec(weight_gradient, (vocab, width), &Device::Cpu)
}

/// Adds the rows in a contiguous `gradient` to the rows at `ids` in a contiguous f32 `sum`
/// `[V, H]`.
pub(crate) fn add<T: Element>(sum: &Tensor, ids: &Tensor, gradient: &Tensor) -> Result<()> {
    let (_, width) = sum.dims2()?;
    slice::write_f32(sum, |sum| add_rows::<T, f32>(sum, width, ids, gradient))
}

fn add_rows<T: Element, S: Element>(
    sum: &mut [S],
    width: usize,
    ids: &Tensor,
    gradient: &Tensor,
) -> Result<()> {
    slice::read::<u32, _>(ids, |ids| {
        slice::read::<T, _>(gradient, |gradient| {
            // The positions, grouped by token, in order.
            let mut places: Vec<usize> = (0..ids.len()).collect();
            places.sort_by_key(|&place| ids[place]);
            let mut rest = sum;
            let mut seen = 0;
            let rows: Vec<_> = places
                .chunk_by(|&a, &b| ids[a] == ids[b])
                .map(|places| {
                    let id = ids[places[0]] as usize;
                    let skipped = std::mem::take(&mut rest)
                        .split_at_mut((id - seen) * width)
                        .1;
                    let (row, after) = skipped.split_at_mut(width);
                    (rest, seen) = (after, id + 1);
                    (row, places)
                })
                .collect();
            rows.into_par_iter().for_each_init(
                || vec![0.0; 2 * width],
                |buffers, (row, places)| {
                    vectors().dispatch(AddRows {
                        gradient,
                        places,
                        row,
                        buffers,
                    });
                },
            );
            Ok(())
        })
    })
}

/// Adds the rows in `gradient` at `places` to `row`. `buffers` holds two rows.
struct AddRows<'a, T, S> {
    gradient: &'a [T],
    places: &'a [usize],
    row: &'a mut [S],
    buffers: &'a mut [f32],
}

impl<T: Element, R: Element> WithSimd for AddRows<'_, T, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let width = self.row.len();
        let (sum, buffer) = self.buffers.split_at_mut(width);
        R::widen(self.row, sum);
        for place in self.places {
            let part = T::widened(&self.gradient[place * width..][..width], buffer);
            for (sum, part) in sum.iter_mut().zip(part) {
                *sum += part;
            }
        }
        for (value, &sum) in self.row.iter_mut().zip(&*sum) {
            *value = R::nearest(sum);
        }
    }
}
