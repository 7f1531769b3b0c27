//! The CPU path of [`add`](crate::add()).

use std::mem::MaybeUninit;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::output;
use crate::cpu::slice::CHUNK;

/// Returns `a + b`, element by element.
pub(crate) fn forward<T: Element>(a: &[T], b: &[T]) -> Vec<T> {
    let fill = |sum: &mut [MaybeUninit<T>]| {
        sum.par_chunks_mut(CHUNK)
            .zip(a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK)))
            .for_each(|(sum, (a, b))| vectors().dispatch(Add { a, b, sum }));
    };
    // SAFETY: the chunks cover the result, and each chunk is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(a.len(), fill)
    }
}

struct Add<'a, T> {
    a: &'a [T],
    b: &'a [T],
    sum: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // The compiler vectorizes this for the processor of `S`.
        for ((sum, &a), &b) in self.sum.iter_mut().zip(self.a).zip(self.b) {
            sum.write(T::nearest(a.wide() + b.wide()));
        }
    }
}
