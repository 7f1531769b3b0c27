//! Transposes: words of columns that lie in memory, side by side.

use std::ops::Range;

use super::element::Element;
use super::instructions::{CpuInstructions, has};
use super::matrix::Matrix;
use super::word::Word;

/// A width that every vector width divides. The width of a panel is a multiple.
pub(crate) const UNIT: usize = 16;

/// The widest panel. A row of sums is 3 vectors of AVX-512.
pub(crate) const WIDEST: usize = 3 * UNIT;

/// Writes `columns` columns of `depth` adjacent entries, which start `stride` apart in `source`, to
/// `panel` `[words, width]`, and zeros after them.
pub(super) fn transpose<T: Element, W: Word>(
    source: &[T],
    stride: usize,
    columns: usize,
    panel: &mut [f32],
    depth: usize,
) {
    if depth == 0 {
        return;
    }
    let words = depth.div_ceil(W::NUMBERS);
    let width = panel.len() / words;
    for first in (0..width).step_by(UNIT) {
        let here = columns.saturating_sub(first).min(UNIT);
        let source = &source[(first * stride).min(source.len())..];
        let mut k = 0;
        #[cfg(target_arch = "x86_64")]
        if here == UNIT && has(CpuInstructions::Avx2) {
            assert!((UNIT - 1) * stride + depth <= source.len());
            assert!(panel.len() == words * width && first + UNIT <= width);
            let target = panel[first..].as_mut_ptr();
            let whole = depth / W::NUMBERS;
            let wide = has(CpuInstructions::Avx512);
            // SAFETY: the processor has the instructions, and the assertion keeps the columns and
            // the panel in their slices.
            #[allow(unsafe_code)]
            unsafe {
                // The rows of a panel that a word of the columns has.
                k = match size_of::<f32>() / (size_of::<T>() * W::NUMBERS) {
                    1 if wide => avx512::columns::<T, 1>(source, stride, target, width, whole),
                    1 => avx2::columns::<T, 1>(source, stride, target, width, whole),
                    2 if T::as_bf16(source).is_none() => 0,
                    2 if wide => avx512::columns::<T, 2>(source, stride, target, width, whole),
                    2 => avx2::columns::<T, 2>(source, stride, target, width, whole),
                    _ => 0,
                };
            }
        }
        if here < UNIT {
            for row in panel.chunks_exact_mut(width) {
                row[first..first + UNIT].fill(0.0);
            }
        }
        // Squares of this size stay in the L1 cache.
        while k < words {
            let until = words.min(k + UNIT);
            for column in 0..here {
                let targets = panel[k * width + first + column..].iter_mut();
                let targets = targets.step_by(width).take(until - k);
                let entries =
                    &source[column * stride..][k * W::NUMBERS..depth.min(until * W::NUMBERS)];
                for (target, word) in targets.zip(entries.chunks(W::NUMBERS)) {
                    let second = word.get(1).map_or(0.0, |second| second.wide());
                    *target = W::word(W::nearest(word[0].wide()), W::nearest(second));
                }
            }
            k = until;
        }
    }
}

/// Writes the words of some rows of a matrix whose numbers are adjacent, so that those of one inner
/// index are adjacent. Returns false if the processor has no instructions for it, or a row has
/// another length than whole words.
///
/// Up to 7 numbers after the words are overwritten.
pub(super) fn interleave<W: Word>(
    numbers: &[W],
    matrix: &Matrix,
    rows: &Range<usize>,
    inner: &Range<usize>,
    target: &mut [f32],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if has(CpuInstructions::Avx2)
        && inner.len().is_multiple_of(W::NUMBERS)
        && !inner.is_empty()
        && rows.len() <= avx2::LANES
    {
        let words = inner.len() / W::NUMBERS;
        let first = rows.start * matrix.row_stride + inner.start;
        let last = (rows.len() - 1) * matrix.row_stride + inner.len();
        let numbers = &numbers[first..first + last];
        assert!(rows.len() * words + avx2::LANES - rows.len() <= target.len());
        // SAFETY: the processor has the instructions, and the rows and the target are in bounds.
        #[allow(unsafe_code)]
        unsafe {
            avx2::interleave(
                numbers.as_ptr(),
                matrix.row_stride,
                rows.len(),
                words,
                target.as_mut_ptr(),
            );
        }
        return true;
    }
    false
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::UNIT;
    use super::WIDEST;

    /// Writes the first `depth` rows of a panel of UNIT columns, which start `stride` numbers apart
    /// in `source`, to rows `width` apart in `target`: a multiple of UNIT * N. Returns the number
    /// of rows.
    ///
    /// A word of a column has the numbers of N rows: itself, or two bf16, which are written in f32.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and `depth` rows of the columns and of `target` are in bounds.
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn columns<T, const N: usize>(
        source: &[T],
        stride: usize,
        target: *mut f32,
        width: usize,
        depth: usize,
    ) -> usize {
        let whole = depth / (N * UNIT) * (N * UNIT);
        for k in (0..whole).step_by(N * UNIT) {
            // SAFETY: the caller keeps `depth` rows in bounds. The loads have no alignment.
            unsafe {
                let word = source.as_ptr().cast::<f32>().add(k / N).cast::<T>();
                let square = transpose(load(word, stride));
                for (at, words) in square.into_iter().enumerate() {
                    for index in 0..N {
                        let row = target.add((k + N * at + index) * width);
                        _mm512_storeu_ps(row, number::<N>(words, index));
                    }
                }
            }
        }
        whole
    }

    /// Returns one of the N numbers of each word. A bf16 is the upper half of an f32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn number<const N: usize>(words: __m512, index: usize) -> __m512 {
        let pairs = _mm512_castps_si512(words);
        match (N, index) {
            (1, _) => words,
            (_, 0) => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
            _ => _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff))),
        }
    }

    /// Loads 64 bytes of each of 16 columns, which start `stride` entries apart.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and the columns are in bounds.
    #[inline]
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    unsafe fn load<T>(source: *const T, stride: usize) -> [__m512; 16] {
        let mut rows = [_mm512_setzero_ps(); 16];
        for (index, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller keeps the columns in bounds.
            *row = unsafe { _mm512_loadu_ps(source.add(index * stride).cast()) };
            // The same place in the next panel. A prefetch does not access memory.
            let next = source.wrapping_add((index + WIDEST) * stride);
            _mm_prefetch::<_MM_HINT_T1>(next.cast());
        }
        rows
    }

    /// Transposes a square of 16 x 16.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transpose(rows: [__m512; 16]) -> [__m512; 16] {
        // Loops and no closures: the compiler may call a closure for each vector.
        // Pairs of entries of two rows, then of four: each 128-bit lane has one column of them.
        let mut pairs = [_mm512_setzero_pd(); 16];
        for i in (0..16).step_by(2) {
            let (a, b) = (rows[i], rows[i + 1]);
            pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
            pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        }
        let mut fours = rows;
        for i in (0..16).step_by(4) {
            for half in 0..2 {
                let (a, b) = (pairs[i + half], pairs[i + half + 2]);
                fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        let mut square = rows;
        for column in 0..4 {
            let (a, b) = (fours[column], fours[4 + column]);
            let (c, d) = (fours[8 + column], fours[12 + column]);
            // Lanes 0 and 2 of two vectors, and lanes 1 and 3.
            let even = [
                _mm512_shuffle_f32x4::<0x88>(a, b),
                _mm512_shuffle_f32x4::<0x88>(c, d),
            ];
            let odd = [
                _mm512_shuffle_f32x4::<0xdd>(a, b),
                _mm512_shuffle_f32x4::<0xdd>(c, d),
            ];
            square[column] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
            square[4 + column] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
            square[8 + column] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
            square[12 + column] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
        }
        square
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    use std::arch::x86_64::*;

    use super::UNIT;
    use super::WIDEST;

    /// Words of a vector.
    pub(crate) const LANES: usize = 8;

    /// [`columns`](super::avx512::columns) with vectors of 8 words.
    ///
    /// # Safety
    ///
    /// The processor has AVX2, and `depth` rows of the columns and of `target` are in bounds.
    #[target_feature(enable = "avx2")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn columns<T, const N: usize>(
        source: &[T],
        stride: usize,
        target: *mut f32,
        width: usize,
        depth: usize,
    ) -> usize {
        let whole = depth / (N * LANES) * (N * LANES);
        for k in (0..whole).step_by(N * LANES) {
            for first in (0..UNIT).step_by(LANES) {
                let word = |column: usize| {
                    let column = source.as_ptr().wrapping_add((first + column) * stride);
                    column.cast::<f32>().wrapping_add(k / N)
                };
                prefetch_next(word(0).cast::<T>(), stride, WIDEST);
                // SAFETY: the caller keeps `depth` rows in bounds. No access has an alignment.
                unsafe {
                    for (at, words) in transposed(word).into_iter().enumerate() {
                        for index in 0..N {
                            let row = target.add((k + N * at + index) * width + first);
                            _mm256_storeu_ps(row, number::<N>(words, index));
                        }
                    }
                }
            }
        }
        whole
    }

    /// Returns one of the N numbers of each word. A bf16 is the upper half of an f32.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn number<const N: usize>(words: __m256, index: usize) -> __m256 {
        let pairs = _mm256_castps_si256(words);
        match (N, index) {
            (1, _) => words,
            (_, 0) => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
            _ => _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff))),
        }
    }

    /// [`interleave`](super::interleave) of `height` rows, which start `stride` numbers apart.
    ///
    /// # Safety
    ///
    /// The processor has AVX2, the rows have `depth` words, `height` is 1 to 8, and `target` has
    /// `height` words for each of them and 8 - `height` more.
    #[target_feature(enable = "avx2")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn interleave<T>(
        source: *const T,
        stride: usize,
        height: usize,
        depth: usize,
        target: *mut f32,
    ) {
        // Lanes without a row read the last one.
        let row = |row: usize| {
            source
                .wrapping_add(row.min(height - 1) * stride)
                .cast::<f32>()
        };
        let whole = depth / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            // SAFETY: the caller keeps the words in bounds. The lanes after the last row of an
            // inner index are written again by the next.
            unsafe {
                let square = transposed(|column| row(column).wrapping_add(k));
                for (entry, values) in square.into_iter().enumerate() {
                    _mm256_storeu_ps(target.add((k + entry) * height), values);
                }
            }
        }
        for k in whole..depth {
            for column in 0..height {
                // SAFETY: the caller keeps the words in bounds.
                unsafe {
                    let word = row(column).wrapping_add(k).read_unaligned();
                    target.add(k * height + column).write(word);
                }
            }
        }
    }

    /// Starts to load the same place of the columns that are `after` later.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn prefetch_next<T>(source: *const T, stride: usize, after: usize) {
        for column in 0..LANES {
            let next = source.wrapping_add((column + after) * stride);
            _mm_prefetch::<_MM_HINT_T1>(next.cast());
        }
    }

    /// Loads 8 words of each of 8 columns, and transposes them.
    ///
    /// # Safety
    ///
    /// The processor has AVX2, and `column` returns the first of the words of a column.
    #[inline]
    #[target_feature(enable = "avx2")]
    #[allow(unsafe_code)]
    pub(crate) unsafe fn transposed(column: impl Fn(usize) -> *const f32) -> [__m256; LANES] {
        let mut square = [_mm256_setzero_ps(); LANES];
        for half in 0..2 {
            // Four words of columns i and i + 4.
            let mut pairs = [_mm256_setzero_ps(); 4];
            for (index, pair) in pairs.iter_mut().enumerate() {
                // SAFETY: the caller keeps the words in bounds.
                unsafe {
                    let low = _mm_loadu_ps(column(index).add(4 * half));
                    let high = _mm_loadu_ps(column(index + 4).add(4 * half));
                    *pair = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high);
                }
            }
            let [a, b, c, d] = pairs;
            let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (low_after, high_after) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            square[4 * half] = _mm256_shuffle_ps::<0x44>(low, low_after);
            square[4 * half + 1] = _mm256_shuffle_ps::<0xee>(low, low_after);
            square[4 * half + 2] = _mm256_shuffle_ps::<0x44>(high, high_after);
            square[4 * half + 3] = _mm256_shuffle_ps::<0xee>(high, high_after);
        }
        square
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(f32::nearest, f32::nearest)]
    #[case(bf16::nearest, f32::nearest)]
    #[case(f16::nearest, f32::nearest)]
    #[case(bf16::nearest, bf16::nearest)]
    fn a_panel_has_the_columns_and_zeros_after_them<T: Element, W: Word>(
        #[case] number: fn(f32) -> T,
        #[case] in_word: fn(f32) -> W,
    ) {
        for (depth, columns) in [
            (16, 16usize),
            (33, 48),
            (7, 5),
            (40, 33),
            (1, 1),
            (64, 47),
            (79, 32),
        ] {
            let stride = depth + 3;
            // Exact in all dtypes, and different in each column.
            let value = |i: usize| (i * 7 % 251) as f32 - 125.0;
            let values: Vec<T> = (0..columns * stride).map(|i| number(value(i))).collect();
            let width = columns.next_multiple_of(UNIT);
            let words = depth.div_ceil(W::NUMBERS);
            let mut panel = vec![f32::NAN; words * width];
            transpose::<T, W>(&values, stride, columns, &mut panel, depth);
            for (k, row) in panel.chunks_exact(width).enumerate() {
                for (column, word) in row.iter().enumerate() {
                    let entry = |k: usize| {
                        if column < columns && k < depth {
                            in_word(value(column * stride + k))
                        } else {
                            in_word(0.0)
                        }
                    };
                    let k = k * W::NUMBERS;
                    assert_eq!(
                        word.to_bits(),
                        W::word(entry(k), entry(k + 1)).to_bits(),
                        "column {column} of {columns}, inner index {k}"
                    );
                }
            }
        }
    }
}
