//! 32-bit words, the units in which products process their factors.

use std::ops::Range;

use half::bf16;
use pulp::{Scalar, Simd, WithSimd};
use rayon::prelude::*;

use super::element::Element;
use super::instructions::{self, CpuInstructions, vectors};
use super::slice::CHUNK;

/// A factor's values.
#[derive(Clone, Copy)]
pub(crate) enum Numbers<'a> {
    Singles(&'a [f32]),
    /// On processors that multiply them in pairs.
    Halves(&'a [bf16]),
}

impl<'a> Numbers<'a> {
    /// Returns `source` in the form that the processor multiplies: bf16, or
    /// [widened](Self::widened).
    pub(crate) fn of<T: Element>(source: &'a [T], buffer: &'a mut Vec<f32>) -> Self {
        if let Some(halves) = T::as_bf16(source)
            && multiplies_pairs()
        {
            return Self::Halves(halves);
        }
        Self::widened(source, buffer)
    }

    /// Returns `source` in f32, in `buffer` if needed.
    pub(crate) fn widened<T: Element>(source: &'a [T], buffer: &'a mut Vec<f32>) -> Self {
        if let Some(singles) = T::as_f32(source) {
            return Self::Singles(singles);
        }
        buffer.resize(source.len(), 0.0);
        buffer
            .par_chunks_mut(CHUNK)
            .zip(source.par_chunks(CHUNK))
            .for_each(|(target, source)| T::widen(source, target));
        Self::Singles(buffer)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Singles(numbers) => numbers.len(),
            Self::Halves(numbers) => numbers.len(),
        }
    }

    /// Returns the values in a range.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::Singles(numbers) => Self::Singles(&numbers[range]),
            Self::Halves(numbers) => Self::Halves(&numbers[range]),
        }
    }
}

/// Returns whether the processor can multiply pairs of bf16 and add both products to an f32 in one
/// instruction.
pub(crate) fn multiplies_pairs() -> bool {
    instructions::has(CpuInstructions::Avx512Bf16)
}

/// Returns whether bf16 is multiplied in AMX tiles.
pub(crate) fn multiplies_in_tiles() -> bool {
    instructions::has(CpuInstructions::Amx)
}

/// Values that fill words.
pub(crate) trait Word: Element {
    /// Values per word.
    const NUMBERS: usize;

    /// Returns a factor's values, if they have this dtype.
    fn numbers(numbers: Numbers<'_>) -> Option<&[Self]>;

    /// Builds a word. An f32 ignores the second value.
    fn word(first: Self, second: Self) -> f32;

    /// Writes words to `target`. Values in neighboring words are `stride` apart. `second` holds
    /// each word's second value; without it they are zeros.
    fn words(first: &[Self], second: Option<&[Self]>, stride: usize, target: &mut [f32]);

    /// Adds the products of two words' values to a sum.
    ///
    /// # Safety
    ///
    /// `simd` must be from [`Self::dispatch`], or have vectors shorter than 64 bytes.
    #[allow(unsafe_code)]
    unsafe fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, sum: S::f32s) -> S::f32s;

    /// Runs `operation` with the vectors that [`Self::mul_add`] requires.
    fn dispatch<O: WithSimd>(operation: O) -> O::Output;
}

/// An f32 fills a whole word.
impl Word for f32 {
    const NUMBERS: usize = 1;

    fn numbers(numbers: Numbers<'_>) -> Option<&[Self]> {
        match numbers {
            Numbers::Singles(numbers) => Some(numbers),
            Numbers::Halves(_) => None,
        }
    }

    #[inline(always)]
    fn word(first: Self, _second: Self) -> f32 {
        first
    }

    #[inline(always)]
    fn words(first: &[Self], _second: Option<&[Self]>, stride: usize, target: &mut [f32]) {
        if stride == 1 {
            return copy(&first[..target.len()], target);
        }
        for (index, target) in target.iter_mut().enumerate() {
            *target = first[index * stride];
        }
    }

    #[inline(always)]
    #[allow(unsafe_code)]
    unsafe fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, sum: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(a, b, sum)
    }

    fn dispatch<O: WithSimd>(operation: O) -> O::Output {
        vectors().dispatch(operation)
    }
}

/// Copies a panel or tile row. Most have one of a few lengths, which take a few instructions
/// instead of a call.
#[inline(always)]
fn copy(source: &[f32], target: &mut [f32]) {
    #[inline(always)]
    fn array<const N: usize>(source: &[f32], target: &mut [f32]) -> bool {
        match (
            <&[f32; N]>::try_from(source),
            <&mut [f32; N]>::try_from(target),
        ) {
            (Ok(source), Ok(target)) => {
                *target = *source;
                true
            }
            _ => false,
        }
    }
    let done =
        array::<16>(source, target) || array::<8>(source, target) || array::<6>(source, target);
    if !done {
        target.copy_from_slice(source);
    }
}

/// Two bf16 with neighboring inner indices. The first is in the lower half.
impl Word for bf16 {
    const NUMBERS: usize = 2;

    fn numbers(numbers: Numbers<'_>) -> Option<&[Self]> {
        match numbers {
            Numbers::Singles(_) => None,
            Numbers::Halves(numbers) => Some(numbers),
        }
    }

    #[inline(always)]
    fn word(first: Self, second: Self) -> f32 {
        f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
    }

    #[inline(always)]
    fn words(first: &[Self], second: Option<&[Self]>, stride: usize, target: &mut [f32]) {
        match second {
            Some(second) if stride == 1 => {
                for ((target, &first), &second) in target.iter_mut().zip(first).zip(second) {
                    *target = Self::word(first, second);
                }
            }
            _ => {
                for (index, target) in target.iter_mut().enumerate() {
                    let second = second.map_or(Self::ZERO, |second| second[index * stride]);
                    *target = Self::word(first[index * stride], second);
                }
            }
        }
    }

    #[inline(always)]
    #[allow(unsafe_code)]
    unsafe fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, sum: S::f32s) -> S::f32s {
        #[cfg(target_arch = "x86_64")]
        if size_of::<S::f32s>() == 64 {
            // SAFETY: all are 64 bytes, for which any bits are valid. `dispatch` has checked for
            // the instruction.
            return unsafe {
                use std::arch::x86_64::_mm512_dpbf16_ps;
                use std::mem::transmute_copy as cast;
                cast(&_mm512_dpbf16_ps(cast(&sum), cast(&a), cast(&b)))
            };
        }
        let [a, b] = [a, b].map(|words| simd.transmute_u32s_f32s(words));
        let sixteen = simd.splat_u32s(16);
        let lower = |words| simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(words, sixteen));
        let mask = simd.splat_u32s(0xffff_0000);
        let upper = |words| simd.transmute_f32s_u32s(simd.and_u32s(words, mask));
        let sum = simd.mul_add_e_f32s(lower(a), lower(b), sum);
        simd.mul_add_e_f32s(upper(a), upper(b), sum)
    }

    fn dispatch<O: WithSimd>(operation: O) -> O::Output {
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V4::try_new()
            && multiplies_pairs()
        {
            // SAFETY: the processor has these features.
            #[allow(unsafe_code)]
            return unsafe { with_pairs(operation, simd) };
        }
        Scalar.vectorize(operation)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")]
fn with_pairs<O: WithSimd>(operation: O, simd: pulp::x86::V4) -> O::Output {
    operation.with_simd(simd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds word products to sums, one vector at a time.
    struct Add<'a> {
        a: &'a [f32],
        b: &'a [f32],
        sums: &'a mut [f32],
    }

    impl WithSimd for Add<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let ((a, _), (b, _)) = (S::as_simd_f32s(self.a), S::as_simd_f32s(self.b));
            let (sums, _) = S::as_mut_simd_f32s(self.sums);
            for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
                // SAFETY: the test uses `dispatch` and scalars.
                #[allow(unsafe_code)]
                unsafe {
                    *sum = bf16::mul_add(simd, a, b, *sum);
                }
            }
        }
    }

    #[test]
    fn both_products_of_a_word_are_added_with_and_without_the_instruction() {
        let number = |i: usize| bf16::from_f32((i * 37 % 101) as f32 / 16.0 - 3.0);
        let numbers = |start: usize| (start..start + 128).map(number).collect::<Vec<_>>();
        let (a, b) = (numbers(0), numbers(1000));
        let words = |numbers: &[bf16]| {
            let mut words = vec![0.0; 64];
            let halves = |first: usize| numbers[first..].iter().step_by(2).copied();
            let [first, second]: [Vec<_>; 2] = [0, 1].map(|first| halves(first).collect());
            bf16::words(&first, Some(&second), 1, &mut words);
            words
        };
        let (a_words, b_words) = (words(&a), words(&b));
        // Exact in f32.
        let expected: Vec<f32> = (0..64)
            .map(|i| {
                0.5 + a[2 * i].wide() * b[2 * i].wide() + a[2 * i + 1].wide() * b[2 * i + 1].wide()
            })
            .collect();
        let mut sums = [vec![0.5; 64], vec![0.5; 64]];
        let [fast, portable] = sums.each_mut().map(|sums| Add {
            a: &a_words,
            b: &b_words,
            sums,
        });
        bf16::dispatch(fast);
        Scalar.vectorize(portable);
        assert_eq!(sums, [expected.clone(), expected]);
    }
}
