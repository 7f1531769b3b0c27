//! Panels: columns of a matrix whose words of one inner index are adjacent.

use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Layout, Result, Storage, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::dequantize::widen;
use super::element::Element;
use super::matmul::{Buffer, Matrix};
use super::slice;
use super::word::{Numbers, Word, multiplies_in_tiles, multiplies_pairs};
use crate::block_type;

/// A width that every vector width divides. The width of a panel is a multiple.
pub(super) const UNIT: usize = 16;

/// The widest panel. A row of sums is 3 vectors of AVX-512.
pub(super) const WIDEST: usize = 3 * UNIT;

/// The second factor of a product, in columns.
pub(super) trait Columns: Sync {
    /// Returns the number of columns.
    fn len(&self) -> usize;

    /// Returns whether `a` can be multiplied by the columns.
    fn fits(&self, a: &Matrix) -> bool;

    /// Returns the transpose, if the bf16 of each column are adjacent in memory.
    #[cfg(target_arch = "x86_64")]
    fn as_rows(&self) -> Option<Matrix<'_>> {
        None
    }

    /// Returns the panel of some columns, if it lies in memory. The inner indices start as in
    /// [`Self::pack`].
    fn packed<W: Word>(&self, _columns: &Range<usize>, _inner: &Range<usize>) -> Option<&[f32]> {
        None
    }

    /// Writes some entries of some columns to `panel` `[words of inner, width]`, and zeros after
    /// them. The inner indices start at a multiple of the length of any quantized block.
    fn pack<W: Word>(
        &self,
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
        wide: &mut Vec<f32>,
    );
}

impl Columns for Matrix<'_> {
    fn len(&self) -> usize {
        self.columns
    }

    fn fits(&self, a: &Matrix) -> bool {
        let same = matches!(
            (self.numbers, a.numbers),
            (Numbers::Singles(_), Numbers::Singles(_)) | (Numbers::Halves(_), Numbers::Halves(_))
        );
        same && self.rows == a.columns && self.in_bounds()
    }

    #[cfg(target_arch = "x86_64")]
    fn as_rows(&self) -> Option<Matrix<'_>> {
        (self.row_stride == 1).then(|| self.t())
    }

    #[inline(always)]
    fn pack<W: Word>(
        &self,
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
        _wide: &mut Vec<f32>,
    ) {
        let Some(numbers) = W::numbers(self.numbers) else {
            return;
        };
        if self.row_stride == 1 && !inner.is_empty() {
            let stride = self.column_stride;
            let source = &numbers[inner.start + columns.start * stride..];
            return transpose::<W, W>(source, stride, columns.len(), panel, inner.len());
        }
        self.pack_words(numbers, columns, inner, panel);
    }
}

impl Matrix<'_> {
    /// [`Columns::pack`] for a panel of any width. `numbers` are those of the matrix.
    ///
    /// Inlined, for the vectors of the caller.
    #[inline(always)]
    pub(super) fn pack_words<W: Word>(
        &self,
        numbers: &[W],
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
    ) {
        if inner.is_empty() {
            return;
        }
        let at = |k: usize| &numbers[k * self.row_stride + columns.start * self.column_stride..];
        let width = panel.len() / inner.len().div_ceil(W::NUMBERS);
        for (k, target) in inner
            .clone()
            .step_by(W::NUMBERS)
            .zip(panel.chunks_exact_mut(width))
        {
            let (target, padding) = target.split_at_mut(columns.len());
            let next = (W::NUMBERS == 2 && k + 1 < inner.end).then(|| at(k + 1));
            W::words(at(k), next, self.column_stride, target);
            padding.fill(0.0);
        }
    }
}

/// A weight `[outputs, inputs]`, or its blocks, whose rows are the columns of a product.
#[derive(Clone, Copy)]
pub(super) enum WeightRows<'a, T> {
    /// Numbers, the length of a row, and the panels if there are any.
    Elements(&'a [T], usize, Option<&'a Panels>),
    /// Blocks of quantized numbers, their type, and the numbers of a row.
    Blocks(&'a [u8], GgmlDType, usize),
}

impl<'a, T: Element> WeightRows<'a, T> {
    /// Returns the rows of a contiguous `weight` with `inputs` numbers in each.
    pub(super) fn new(
        storage: &'a Storage,
        layout: &Layout,
        weight: &Tensor,
        inputs: usize,
        panels: Option<&'a Panels>,
    ) -> Result<Self> {
        Ok(match weight.dtype() {
            DType::U8 => Self::Blocks(
                slice::elements(storage, layout)?,
                block_type(weight)?,
                inputs,
            ),
            _ => Self::Elements(slice::elements(storage, layout)?, inputs, panels),
        })
    }
}

impl<T: Element> Columns for WeightRows<'_, T> {
    fn len(&self) -> usize {
        match *self {
            Self::Elements(elements, inputs, _) => elements.len() / inputs,
            Self::Blocks(bytes, block_type, inputs) => bytes.len() / row_bytes(block_type, inputs),
        }
    }

    fn fits(&self, a: &Matrix) -> bool {
        let (Self::Elements(_, inputs, _) | Self::Blocks(_, _, inputs)) = *self;
        inputs == a.columns && (matches!(a.numbers, Numbers::Singles(_)) || T::DTYPE == DType::BF16)
    }

    #[cfg(target_arch = "x86_64")]
    fn as_rows(&self) -> Option<Matrix<'_>> {
        let Self::Elements(elements, inputs, _) = *self else {
            return None;
        };
        let numbers = Numbers::Halves(T::as_bf16(elements)?);
        Some(Matrix::of(numbers, elements.len() / inputs, inputs, inputs))
    }

    #[inline(always)]
    fn packed<W: Word>(&self, columns: &Range<usize>, inner: &Range<usize>) -> Option<&[f32]> {
        match *self {
            Self::Elements(_, _, Some(panels)) => Some(panels.get::<W>(columns, inner)),
            _ => None,
        }
    }

    fn pack<W: Word>(
        &self,
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
        wide: &mut Vec<f32>,
    ) {
        if let Self::Elements(elements, inputs, _) = *self
            && T::DTYPE != DType::F16
        {
            let source = &elements[columns.start * inputs + inner.start..];
            return transpose::<T, W>(source, inputs, columns.len(), panel, inner.len());
        }
        let words = inner.len().div_ceil(W::NUMBERS);
        wide.resize(wide.len().max(columns.len() * inner.len()), 0.0);
        for (column, wide) in columns.clone().zip(wide.chunks_exact_mut(inner.len())) {
            match *self {
                Self::Elements(elements, inputs, _) => {
                    T::widen(&elements[column * inputs..][inner.clone()], wide);
                }
                Self::Blocks(bytes, block_type, inputs) => {
                    let at = |numbers| row_bytes(block_type, numbers);
                    let row = &bytes[column * at(inputs)..][at(inner.start)..at(inner.end)];
                    widen(row, block_type, wide);
                    if T::as_f32(&[]).is_none() {
                        for number in &mut *wide {
                            *number = T::nearest(*number).wide();
                        }
                    }
                }
            }
            if W::NUMBERS == 2 {
                for k in 0..words {
                    let second = wide.get(2 * k + 1).copied().unwrap_or_default();
                    wide[k] = W::word(W::nearest(wide[2 * k]), W::nearest(second));
                }
            }
        }
        transpose::<f32, f32>(wide, inner.len(), columns.len(), panel, words);
    }
}

/// The columns of each panel of a matrix: about the same number, in units that every vector width
/// divides, and at most `widest`.
pub(super) fn panels(columns: usize, widest: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let units = columns.div_ceil(UNIT);
    let panels = units.div_ceil(widest / UNIT);
    let bound = move |panel: usize| columns.min(panel * units / panels * UNIT);
    (0..panels).map(move |panel| bound(panel)..bound(panel + 1))
}

/// All panels of a weight, one after another, in the words of its dtype.
pub(crate) struct Panels {
    words: Buffer,
    /// The words of a column.
    depth: usize,
}

impl Panels {
    /// Returns whether a weight of `dtype` is multiplied in panels with the words of its dtype.
    pub(crate) fn exist(dtype: DType) -> bool {
        match dtype {
            DType::F32 => true,
            DType::BF16 => multiplies_pairs() && !multiplies_in_tiles(),
            _ => false,
        }
    }

    /// Packs a contiguous `weight` `[outputs, inputs]`, if its panels [`exist`](Self::exist).
    pub(crate) fn new(weight: &Tensor) -> Result<Option<Self>> {
        match weight.dtype() {
            dtype if !Self::exist(dtype) => Ok(None),
            DType::F32 => Self::of::<f32>(weight).map(Some),
            _ => Self::of::<bf16>(weight).map(Some),
        }
    }

    fn of<W: Word>(weight: &Tensor) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let (storage, layout) = weight.storage_and_layout();
        let rows = WeightRows::<W>::new(&storage, layout, weight, inputs, None)?;
        let depth = inputs.div_ceil(W::NUMBERS);
        let mut words = Buffer::default();
        let mut rest = words.first(depth * outputs.next_multiple_of(UNIT));
        let mut targets = Vec::new();
        for columns in panels(outputs, WIDEST) {
            let len = depth * columns.len().next_multiple_of(UNIT);
            let (target, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            targets.push((columns, target));
        }
        targets.into_par_iter().for_each(|(columns, target)| {
            rows.pack::<W>(&columns, &(0..inputs), target, &mut vec![])
        });
        Ok(Self { words, depth })
    }

    /// See [`Columns::packed`].
    #[inline(always)]
    fn get<W: Word>(&self, columns: &Range<usize>, inner: &Range<usize>) -> &[f32] {
        let width = columns.len().next_multiple_of(UNIT);
        let start = columns.start * self.depth + inner.start / W::NUMBERS * width;
        self.words
            .get(start..start + inner.len().div_ceil(W::NUMBERS) * width)
    }
}

/// The bytes of the blocks of some numbers.
fn row_bytes(block_type: GgmlDType, numbers: usize) -> usize {
    numbers / block_type.block_size() * block_type.type_size()
}

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
        if here == UNIT && is_x86_feature_detected!("avx512f") {
            assert!((UNIT - 1) * stride + depth <= source.len());
            assert!(panel.len() == words * width && first + UNIT <= width);
            let target = panel[first..].as_mut_ptr();
            let whole = depth / W::NUMBERS;
            // SAFETY: the processor has AVX-512, and the assertion keeps the columns and the
            // panel in their slices.
            #[allow(unsafe_code)]
            unsafe {
                k = match (T::as_bf16(source), W::NUMBERS) {
                    (Some(source), 1) => avx512::columns_bf16(source, stride, target, width, whole),
                    _ if size_of::<T>() * W::NUMBERS == size_of::<f32>() => {
                        avx512::columns(source, stride, target, width, whole)
                    }
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

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::UNIT;

    /// Writes the first multiple of [`UNIT`] words of UNIT columns, which start `stride` numbers
    /// apart, to rows `width` apart. Returns the number of words.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and `depth` words of the columns and of `target` are in bounds.
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn columns<T>(
        source: &[T],
        stride: usize,
        target: *mut f32,
        width: usize,
        depth: usize,
    ) -> usize {
        let whole = depth / UNIT * UNIT;
        for k in (0..whole).step_by(UNIT) {
            // SAFETY: the caller keeps `depth` words in bounds. The loads have no alignment.
            unsafe {
                let word = source.as_ptr().cast::<f32>().add(k).cast::<T>();
                let square = transpose(load(word, stride));
                for (entry, values) in square.into_iter().enumerate() {
                    _mm512_storeu_ps(target.add((k + entry) * width), values);
                }
            }
        }
        whole
    }

    /// [`columns`] of bf16 in f32, in multiples of two UNITs.
    ///
    /// # Safety
    ///
    /// As for [`columns`].
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn columns_bf16(
        source: &[bf16],
        stride: usize,
        target: *mut f32,
        width: usize,
        depth: usize,
    ) -> usize {
        let whole = depth / (2 * UNIT) * (2 * UNIT);
        let upper = _mm512_set1_epi32(!0xffff);
        for k in (0..whole).step_by(2 * UNIT) {
            // SAFETY: the caller keeps `depth` entries in bounds. The loads have no alignment.
            unsafe {
                // Pairs of neighbors stay together. A bf16 is the upper half of an f32.
                let square = transpose(load(source.as_ptr().add(k), stride));
                for (pair, values) in square.into_iter().enumerate() {
                    let pairs = _mm512_castps_si512(values);
                    let target = target.add((k + 2 * pair) * width);
                    let first = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
                    let second = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
                    _mm512_storeu_ps(target, first);
                    _mm512_storeu_ps(target.add(width), second);
                }
            }
        }
        whole
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
            let next = source.wrapping_add((index + super::WIDEST) * stride);
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

#[cfg(test)]
mod tests {
    use half::f16;
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
                    let entry = |k: usize| match column < columns && k < depth {
                        true => in_word(value(column * stride + k)),
                        false => in_word(0.0),
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
