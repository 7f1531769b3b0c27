//! Matrix products in f32, with `gemm`, the crate that Candle uses.

use candle_core::{Layout, Result, Tensor};
use gemm::Parallelism;

use super::slice;

/// A matrix in a slice, with entry (i, j) at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Returns a matrix whose rows start `row_stride` apart.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self {
            values,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    /// Returns the matrix of a tensor. `values` is the whole storage.
    fn from_layout(values: &'a [f32], layout: &Layout) -> Result<Self> {
        let (rows, columns) = layout.shape().dims2()?;
        Ok(Self {
            values: &values[layout.start_offset()..],
            rows,
            columns,
            row_stride: layout.stride()[0],
            column_stride: layout.stride()[1],
        })
    }

    /// Returns the transpose, in the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the length of the slice that the entries span.
    fn extent(&self) -> usize {
        extent(self.rows, self.columns, self.row_stride, self.column_stride)
    }
}

fn extent(rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> usize {
    match (rows, columns) {
        (0, _) | (_, 0) => 0,
        _ => (rows - 1) * row_stride + (columns - 1) * column_stride + 1,
    }
}

/// Computes `target = a b`, or `target += a b` if `add` is set, on all cores.
///
/// The rows of `target` start `row_stride` apart. One core sums each entry, so the result is the
/// same on any number of cores.
///
/// # Panics
///
/// Panics if the matrices do not fit each other or `target`.
pub(crate) fn matmul(target: &mut [f32], row_stride: usize, add: bool, a: Matrix, b: Matrix) {
    product(target, row_stride, add, a, b, Parallelism::Rayon(0));
}

/// [`matmul`] on the calling core.
///
/// # Panics
///
/// Panics if the matrices do not fit each other or `target`.
pub(crate) fn matmul_on_one_core(
    target: &mut [f32],
    row_stride: usize,
    add: bool,
    a: Matrix,
    b: Matrix,
) {
    product(target, row_stride, add, a, b, Parallelism::None);
}

/// Computes `sum += a b` for f32 tensors with a contiguous `sum`.
pub(crate) fn add_matmul(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let (a_storage, a_layout) = a.storage_and_layout();
    let (b_storage, b_layout) = b.storage_and_layout();
    let a = Matrix::from_layout(slice::on_cpu(&a_storage)?.as_slice()?, a_layout)?;
    let b = Matrix::from_layout(slice::on_cpu(&b_storage)?.as_slice()?, b_layout)?;
    slice::write_f32(sum, |sum| {
        matmul(sum, b.columns, true, a, b);
        Ok(())
    })
}

fn product(
    target: &mut [f32],
    row_stride: usize,
    add: bool,
    a: Matrix,
    b: Matrix,
    parallelism: Parallelism,
) {
    assert_eq!(a.columns, b.rows, "the inner dimensions differ");
    assert!(a.extent() <= a.values.len() && b.extent() <= b.values.len());
    assert!(row_stride >= b.columns && extent(a.rows, b.columns, row_stride, 1) <= target.len());
    // SAFETY: the assertions keep every entry inside its slice. Strides fit isize because the
    // slices do. The rows of the target do not overlap. It is borrowed mutably, so it overlaps
    // no operand.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            target.as_mut_ptr(),
            1,
            row_stride as isize,
            add,
            a.values.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.values.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
