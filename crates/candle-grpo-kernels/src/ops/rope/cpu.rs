//! The CPU path of [`rope`](crate::rope()).

use std::mem::MaybeUninit;

use candle_core::Result;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::Rope;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::{output, slice};

/// Rotates the heads in rows `[N, width]`.
pub(crate) fn rotate<T: Element>(x: &[T], width: usize, op: &Rope) -> Result<Vec<T>> {
    let pairs = op.cos.dims()[op.cos.rank() - 1];
    slice::read::<f32, _>(&op.cos, |cos| {
        slice::read::<f32, _>(&op.sin, |sin| {
            let angles = cos.par_chunks_exact(pairs).zip(sin.par_chunks_exact(pairs));
            let fill = |y: &mut [MaybeUninit<T>]| {
                y.par_chunks_exact_mut(width)
                    .zip(x.par_chunks_exact(width).zip(angles))
                    .for_each_init(
                        || vec![0.0; width],
                        |buffer, (y, (x, (cos, sin)))| {
                            vectors().dispatch(Row {
                                x,
                                cos,
                                sin,
                                back: op.back,
                                y,
                                buffer,
                            });
                        },
                    );
            };
            // SAFETY: the rows cover the result, and each row is written completely.
            #[allow(unsafe_code)]
            Ok(unsafe { output::filled(x.len(), fill) })
        })
    })
}

/// Rotates a row. `buffer` has the length of `x`.
struct Row<'a, T> {
    x: &'a [T],
    cos: &'a [f32],
    sin: &'a [f32],
    back: bool,
    y: &'a mut [MaybeUninit<T>],
    buffer: &'a mut [f32],
}

impl<T: Element> WithSimd for Row<'_, T> {
    type Output = ();

    /// Plain loops, which the compiler vectorizes.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        T::widen(self.x, self.buffer);
        let pairs = self.cos.len();
        let sign = if self.back { -1.0 } else { 1.0 };
        for head in self.buffer.chunks_exact_mut(2 * pairs) {
            let (first, second) = head.split_at_mut(pairs);
            let angles = self.cos.iter().zip(self.sin);
            for ((a, b), (&cos, &sin)) in first.iter_mut().zip(second).zip(angles) {
                let sin = sign * sin;
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        T::write(self.buffer, self.y);
    }
}
