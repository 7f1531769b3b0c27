//! Matrices in slices.

use candle_core::{Layout, Result};

use super::element::Element;
use super::word::Numbers;

/// A matrix in a slice, with entry (i, j) at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) numbers: Numbers<'a>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Returns a matrix whose rows start `row_stride` apart.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self::of(Numbers::Singles(values), rows, columns, row_stride)
    }

    /// Like [`Self::new`], with values in any dtype.
    pub(crate) fn of(numbers: Numbers<'a>, rows: usize, columns: usize, row_stride: usize) -> Self {
        Self {
            numbers,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    /// Returns a tensor's matrix. `values` is the whole storage. `buffer` holds the values if they
    /// have to be converted to f32.
    pub(crate) fn from_layout<T: Element>(
        values: &'a [T],
        layout: &Layout,
        buffer: &'a mut Vec<f32>,
    ) -> Result<Self> {
        let (rows, columns) = layout.shape().dims2()?;
        let mut matrix = Self {
            numbers: Numbers::Singles(&[]),
            rows,
            columns,
            row_stride: layout.stride()[0],
            column_stride: layout.stride()[1],
        };
        let values = &values[layout.start_offset()..][..matrix.span()];
        matrix.numbers = Numbers::of(values, buffer);
        Ok(matrix)
    }

    /// Returns the transpose, sharing memory.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the number of values from the first to the last entry, inclusive.
    fn span(&self) -> usize {
        match (self.rows, self.columns) {
            (0, _) | (_, 0) => 0,
            _ => (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1,
        }
    }

    pub(crate) fn in_bounds(&self) -> bool {
        self.span() <= self.numbers.len()
    }
}
