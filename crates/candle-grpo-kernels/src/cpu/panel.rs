//! Panels: matrix columns packed so that words with the same inner index are adjacent.

use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Layout, Result, Storage, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::blocks::widen;
use super::buffer::Buffer;
use super::element::Element;
use super::matrix::Matrix;
use super::slice;
use super::transpose::{UNIT, transpose};
use super::word::{Numbers, Word, multiplies_in_tiles, multiplies_pairs};
use crate::blocks::block_type;

/// A product's second factor, as columns.
pub(crate) trait Columns: Sync {
    /// Returns the number of columns.
    fn len(&self) -> usize;

    /// Returns whether `a` can be multiplied by these columns.
    fn fits(&self, a: &Matrix) -> bool;

    /// Returns the transpose, if each column's values are adjacent in memory.
    #[cfg(target_arch = "x86_64")]
    fn as_rows(&self) -> Option<Matrix<'_>> {
        None
    }

    /// Returns the alignment for the first inner index in each part.
    fn block(&self) -> usize {
        UNIT
    }

    /// Returns whether [`Self::packed`] has panels.
    fn is_packed(&self) -> bool {
        false
    }

    /// Returns the panel for some columns, if it is already in memory. The inner indices start as
    /// in [`Self::pack`].
    fn packed<W: Word>(&self, _columns: &Range<usize>, _inner: &Range<usize>) -> Option<Panel<'_>> {
        None
    }

    /// Packs some entries from some columns into `panel` `[words of inner, width]`, followed by
    /// zeros. Inner indices start at a multiple of [`Self::block`].
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
    /// Like [`Columns::pack`], for any panel width. `numbers` are the matrix values.
    ///
    /// Inlined, to use the caller's vectors.
    #[inline(always)]
    pub(crate) fn pack_words<W: Word>(
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

/// A weight `[outputs, inputs]`, dense or in blocks, whose rows are the columns of a product.
#[derive(Clone, Copy)]
pub(crate) enum WeightRows<'a, T> {
    /// Values, the row length, and packed panels if available.
    Elements(&'a [T], usize, Option<&'a Panels>),
    /// Quantized blocks, their type, and the number of values per row.
    Blocks(&'a [u8], GgmlDType, usize),
}

impl<'a, T: Element> WeightRows<'a, T> {
    /// Returns the rows of a contiguous `weight`, with `inputs` values each.
    pub(crate) fn new(
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
        let numbers = T::as_bf16(elements).map(Numbers::Halves);
        let numbers = numbers.or_else(|| T::as_f32(elements).map(Numbers::Singles))?;
        Some(Matrix::of(numbers, elements.len() / inputs, inputs, inputs))
    }

    fn block(&self) -> usize {
        match self {
            Self::Elements(..) => UNIT,
            Self::Blocks(_, block_type, _) => block_type.block_size().next_multiple_of(UNIT),
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self, Self::Elements(_, _, Some(_)))
    }

    #[inline(always)]
    fn packed<W: Word>(&self, columns: &Range<usize>, inner: &Range<usize>) -> Option<Panel<'_>> {
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

/// Divides a matrix into panels: about the same number of columns each, in units that every vector
/// width divides, and at most `widest`.
pub(crate) fn panels(columns: usize, widest: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let units = columns.div_ceil(UNIT);
    let panels = units.div_ceil(widest / UNIT);
    let bound = move |panel: usize| columns.min(panel * units / panels * UNIT);
    (0..panels).map(move |panel| bound(panel)..bound(panel + 1))
}

/// Product columns in units `[words, UNIT]`. In the last one, zeros follow the columns.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'p> {
    /// Starts at the first word in the first unit.
    words: &'p [f32],
    /// Distance between units.
    stride: usize,
}

impl<'p> Panel<'p> {
    /// Packs some entries from some columns of `b` into `buffer`, like [`Columns::pack`].
    #[inline(always)]
    pub(crate) fn pack<W: Word>(
        b: &impl Columns,
        columns: &Range<usize>,
        inner: &Range<usize>,
        buffer: &'p mut Buffer,
        wide: &mut Vec<f32>,
    ) -> Self {
        let stride = inner.len().div_ceil(W::NUMBERS) * UNIT;
        let words = buffer.first(columns.len().div_ceil(UNIT) * stride);
        for (unit, first) in columns.clone().step_by(UNIT).enumerate() {
            let columns = first..columns.end.min(first + UNIT);
            let unit = &mut words[unit * stride..][..stride];
            b.pack::<W>(&columns, inner, unit, wide);
        }
        Self { words, stride }
    }

    /// Returns the units starting at `unit`.
    #[inline(always)]
    pub(crate) fn from(self, unit: usize) -> Self {
        Self {
            words: &self.words[unit * self.stride..],
            stride: self.stride,
        }
    }

    /// Returns whether there are `units` units with `depth` words per column.
    #[inline(always)]
    pub(crate) fn holds(&self, units: usize, depth: usize) -> bool {
        units.saturating_sub(1) * self.stride + depth * UNIT <= self.words.len()
    }

    /// Returns a unit's first word.
    #[inline(always)]
    pub(crate) fn unit(&self, unit: usize) -> *const f32 {
        self.words.as_ptr().wrapping_add(unit * self.stride)
    }
}

/// All units of a weight, concatenated, in words for its dtype.
pub(crate) struct Panels {
    words: Buffer,
    /// Words per column.
    depth: usize,
}

impl Panels {
    /// Returns whether weights in `dtype` are multiplied in panels with words for that dtype.
    pub(crate) fn exist(dtype: DType) -> bool {
        match dtype {
            DType::F32 => true,
            DType::BF16 => multiplies_pairs() && !multiplies_in_tiles(),
            _ => false,
        }
    }

    /// Packs a contiguous `weight` `[outputs, inputs]`, if panels [`exist`](Self::exist) for it.
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
        words
            .first(depth * outputs.next_multiple_of(UNIT))
            .par_chunks_mut((depth * UNIT).max(1))
            .enumerate()
            .for_each(|(unit, target)| {
                let columns = unit * UNIT..outputs.min((unit + 1) * UNIT);
                rows.pack::<W>(&columns, &(0..inputs), target, &mut vec![]);
            });
        Ok(Self { words, depth })
    }

    /// See [`Columns::packed`].
    #[inline(always)]
    fn get<W: Word>(&self, columns: &Range<usize>, inner: &Range<usize>) -> Panel<'_> {
        let stride = self.depth * UNIT;
        let start = columns.start / UNIT * stride + inner.start / W::NUMBERS * UNIT;
        let last = columns.len().div_ceil(UNIT).saturating_sub(1) * stride;
        let words = inner.len().div_ceil(W::NUMBERS) * UNIT;
        Panel {
            words: self.words.get(start..start + last + words),
            stride,
        }
    }
}

/// Size in bytes of the blocks for `numbers` values.
fn row_bytes(block_type: GgmlDType, numbers: usize) -> usize {
    numbers / block_type.block_size() * block_type.type_size()
}
