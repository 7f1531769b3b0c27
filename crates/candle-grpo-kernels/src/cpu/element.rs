//! Float dtypes that the fused paths read and write. They compute in f32.

use std::mem::MaybeUninit;

use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::instructions::vectors;
use super::output;
use super::slice::CHUNK;

/// A float with up to 32 bits.
pub(crate) trait Element: WithDType + Sync {
    /// Returns `source` in f32. Uses `buffer`, which must have the same length, unless `source` is
    /// f32.
    #[inline(always)]
    fn widened<'a>(source: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        match Self::as_f32(source) {
            Some(source) => source,
            None => {
                Self::widen(source, buffer);
                buffer
            }
        }
    }

    /// Copies `source` to `target`, which must have the same length.
    fn widen(source: &[Self], target: &mut [f32]);

    /// Returns `source` if it is f32.
    #[inline(always)]
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Returns `source` if it is bf16.
    #[inline(always)]
    fn as_bf16(_: &[Self]) -> Option<&[bf16]> {
        None
    }

    /// Returns `target` if it is f32.
    #[inline(always)]
    fn as_f32_mut(_: &mut [Self]) -> Option<&mut [f32]> {
        None
    }

    /// Returns `target` if it is bf16.
    #[inline(always)]
    fn as_bf16_mut(_: &mut [Self]) -> Option<&mut [bf16]> {
        None
    }

    /// Returns uninitialized `target` if it is f32.
    #[inline(always)]
    fn as_uninit_f32(_: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]> {
        None
    }

    /// Rounds to this dtype.
    fn nearest(value: f32) -> Self;

    /// Converts to f32.
    fn wide(self) -> f32;

    /// Rounds `source` on all cores.
    fn rounded(source: Vec<f32>) -> Vec<Self> {
        let fill = |target: &mut [MaybeUninit<Self>]| {
            target
                .par_chunks_mut(CHUNK)
                .zip(source.par_chunks(CHUNK))
                .for_each(|(target, source)| vectors().dispatch(Round { source, target }));
        };
        // SAFETY: the chunks cover the result, and each chunk is written completely.
        #[allow(unsafe_code)]
        unsafe {
            output::filled(source.len(), fill)
        }
    }

    /// Rounds `source` to `target`, which must have the same length.
    #[inline(always)]
    fn write(source: &[f32], target: &mut [MaybeUninit<Self>]) {
        for (target, &value) in target.iter_mut().zip(source) {
            target.write(Self::nearest(value));
        }
    }
}

struct Round<'a, T> {
    source: &'a [f32],
    target: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for Round<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        T::write(self.source, self.target);
    }
}

impl Element for f32 {
    fn rounded(source: Vec<f32>) -> Vec<Self> {
        source
    }

    #[inline(always)]
    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    #[inline(always)]
    fn as_f32(source: &[Self]) -> Option<&[f32]> {
        Some(source)
    }

    #[inline(always)]
    fn as_f32_mut(target: &mut [Self]) -> Option<&mut [f32]> {
        Some(target)
    }

    #[inline(always)]
    fn as_uninit_f32(target: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<f32>]> {
        Some(target)
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn as_bf16(source: &[Self]) -> Option<&[bf16]> {
        Some(source)
    }

    #[inline(always)]
    fn as_bf16_mut(target: &mut [Self]) -> Option<&mut [bf16]> {
        Some(target)
    }

    #[inline(always)]
    fn widen(source: &[Self], target: &mut [f32]) {
        // bf16 is the upper half of an f32, so this is a shift, which the compiler vectorizes.
        for (target, value) in target.iter_mut().zip(source) {
            *target = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}
