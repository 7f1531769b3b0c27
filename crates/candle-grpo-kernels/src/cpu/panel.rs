//! Panels: columns of a matrix whose entries of one inner index are adjacent.

use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Layout, Result, Storage, Tensor};

use super::dequantize::widen;
use super::element::Element;
use super::matmul::Matrix;
use super::slice;
use crate::block_type;

/// A width that every vector width divides. The width of a panel is a multiple.
pub(super) const UNIT: usize = 16;

/// The widest panel. A row of sums is 3 vectors of AVX-512.
pub(super) const WIDEST: usize = 3 * UNIT;

/// The second factor of a product, in columns.
pub(super) trait Columns: Sync {
    /// Returns the number of columns.
    fn len(&self) -> usize;

    /// Returns whether there are columns of `inner` entries.
    fn fits(&self, inner: usize) -> bool;

    /// Writes some entries of some columns to `panel` `[inner, width]`, and zeros after them. The
    /// inner indices start at a multiple of the length of any quantized block.
    fn pack(
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

    fn fits(&self, inner: usize) -> bool {
        self.rows == inner && self.in_bounds()
    }

    fn pack(
        &self,
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
        _wide: &mut Vec<f32>,
    ) {
        if inner.is_empty() {
            return;
        }
        let start = inner.start * self.row_stride + columns.start * self.column_stride;
        let source = &self.values[start..];
        if self.row_stride == 1 {
            return transpose(
                source,
                self.column_stride,
                columns.len(),
                panel,
                inner.len(),
            );
        }
        let width = panel.len() / inner.len();
        for (k, target) in panel.chunks_exact_mut(width).enumerate() {
            let source = &source[k * self.row_stride..];
            let (target, padding) = target.split_at_mut(columns.len());
            if self.column_stride == 1 {
                target.copy_from_slice(&source[..columns.len()]);
            } else {
                for (column, target) in target.iter_mut().enumerate() {
                    *target = source[column * self.column_stride];
                }
            }
            padding.fill(0.0);
        }
    }
}

/// A weight `[outputs, inputs]`, or its blocks, whose rows are the columns of a product.
#[derive(Clone, Copy)]
pub(super) enum WeightRows<'a, T> {
    Elements(&'a [T], usize),
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
    ) -> Result<Self> {
        Ok(match weight.dtype() {
            DType::U8 => Self::Blocks(
                slice::elements(storage, layout)?,
                block_type(weight)?,
                inputs,
            ),
            _ => Self::Elements(slice::elements(storage, layout)?, inputs),
        })
    }
}

impl<T: Element> Columns for WeightRows<'_, T> {
    fn len(&self) -> usize {
        match *self {
            Self::Elements(elements, inputs) => elements.len() / inputs,
            Self::Blocks(bytes, block_type, inputs) => bytes.len() / row_bytes(block_type, inputs),
        }
    }

    fn fits(&self, inner: usize) -> bool {
        match *self {
            Self::Elements(_, inputs) | Self::Blocks(_, _, inputs) => inputs == inner,
        }
    }

    fn pack(
        &self,
        columns: &Range<usize>,
        inner: &Range<usize>,
        panel: &mut [f32],
        wide: &mut Vec<f32>,
    ) {
        if let Self::Elements(elements, inputs) = *self
            && T::DTYPE != DType::F16
        {
            let source = &elements[columns.start * inputs + inner.start..];
            return transpose(source, inputs, columns.len(), panel, inner.len());
        }
        wide.resize(wide.len().max(columns.len() * inner.len()), 0.0);
        for (column, wide) in columns.clone().zip(wide.chunks_exact_mut(inner.len())) {
            match *self {
                Self::Elements(elements, inputs) => {
                    T::widen(&elements[column * inputs..][inner.clone()], wide);
                }
                Self::Blocks(bytes, block_type, inputs) => {
                    let at = |numbers| row_bytes(block_type, numbers);
                    let row = &bytes[column * at(inputs)..][at(inner.start)..at(inner.end)];
                    widen(row, block_type, wide);
                    if T::as_f32(&[]).is_none() {
                        for number in wide {
                            *number = T::nearest(*number).wide();
                        }
                    }
                }
            }
        }
        transpose(wide, inner.len(), columns.len(), panel, inner.len());
    }
}

/// The bytes of the blocks of some numbers.
fn row_bytes(block_type: GgmlDType, numbers: usize) -> usize {
    numbers / block_type.block_size() * block_type.type_size()
}

/// Writes `columns` columns, which start `stride` apart in `source` and have adjacent entries, to
/// `panel` `[depth, width]`, and zeros after them.
fn transpose<T: Element>(
    source: &[T],
    stride: usize,
    columns: usize,
    panel: &mut [f32],
    depth: usize,
) {
    if depth == 0 {
        return;
    }
    let width = panel.len() / depth;
    for first in (0..width).step_by(UNIT) {
        let here = columns.saturating_sub(first).min(UNIT);
        let source = &source[(first * stride).min(source.len())..];
        let mut k = 0;
        #[cfg(target_arch = "x86_64")]
        if here == UNIT && is_x86_feature_detected!("avx512f") {
            assert!((UNIT - 1) * stride + depth <= source.len() && panel.len() == depth * width);
            let target = panel[first..].as_mut_ptr();
            // SAFETY: the processor has AVX-512, and the assertion keeps the columns and the
            // panel in their slices.
            #[allow(unsafe_code)]
            unsafe {
                k = match (T::as_f32(source), T::as_bf16(source)) {
                    (Some(source), _) => avx512::columns(source, stride, target, width, depth),
                    (_, Some(source)) => avx512::columns_bf16(source, stride, target, width, depth),
                    _ => 0,
                };
            }
        }
        // Squares of this size stay in the L1 cache.
        while k < depth {
            let until = depth.min(k + UNIT);
            for column in 0..UNIT {
                let targets = panel[k * width + first + column..]
                    .iter_mut()
                    .step_by(width);
                if column < here {
                    let entries = &source[column * stride..][k..until];
                    targets
                        .zip(entries)
                        .for_each(|(target, &entry)| *target = entry.wide());
                } else {
                    targets.take(until - k).for_each(|target| *target = 0.0);
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

    /// Writes the first multiple of [`UNIT`] entries of UNIT columns, which start `stride` apart,
    /// to rows `width` apart. Returns the number of entries.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and `depth` entries of the columns and of `target` are in bounds.
    #[target_feature(enable = "avx512f")]
    #[allow(unsafe_code)]
    pub(super) unsafe fn columns(
        source: &[f32],
        stride: usize,
        target: *mut f32,
        width: usize,
        depth: usize,
    ) -> usize {
        let whole = depth / UNIT * UNIT;
        for k in (0..whole).step_by(UNIT) {
            // SAFETY: the caller keeps `depth` entries in bounds.
            unsafe {
                let square = transpose(load(source.as_ptr().add(k), stride));
                for (entry, values) in square.into_iter().enumerate() {
                    _mm512_storeu_ps(target.add((k + entry) * width), values);
                }
            }
        }
        whole
    }

    /// [`columns`] of bf16, in multiples of two UNITs.
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
    use half::{bf16, f16};
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(f32::nearest)]
    #[case(bf16::nearest)]
    #[case(f16::nearest)]
    fn a_panel_has_the_columns_and_zeros_after_them<T: Element>(#[case] number: fn(f32) -> T) {
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
            let values: Vec<T> = (0..columns * stride)
                .map(|i| number((i * 7 % 251) as f32 - 125.0))
                .collect();
            let width = columns.next_multiple_of(UNIT);
            let mut panel = vec![f32::NAN; depth * width];
            transpose(&values, stride, columns, &mut panel, depth);
            for (k, row) in panel.chunks_exact(width).enumerate() {
                for (column, &entry) in row.iter().enumerate() {
                    let expected = match column < columns {
                        true => values[column * stride + k].wide(),
                        false => 0.0,
                    };
                    assert_eq!(
                        entry, expected,
                        "column {column} of {columns}, inner index {k}"
                    );
                }
            }
        }
    }
}
