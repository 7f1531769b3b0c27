//! The CPU path of [`add_matmul`](crate::add_matmul()) and [`matmul`](crate::matmul).

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::matmul::matmul;
use crate::cpu::matrix::Matrix;
use crate::cpu::slice::CHUNK;
use crate::cpu::{slice, with_floats};

/// Computes `sum += a b` for a contiguous `sum`.
pub(crate) fn add_matmul<T: Element>(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    with_matrices::<T, _>(a, b, |a, b| {
        slice::write_storage(sum, |storage, range| {
            with_floats!(storage, "sum", sum => add_to(&mut sum[range], a, b));
            Ok(())
        })
    })
}

/// Adds `a b` to `sum`, and rounds once.
fn add_to<S: Element>(sum: &mut [S], a: Matrix, b: Matrix) {
    if let Some(sum) = S::as_f32_mut(sum) {
        return matmul(sum, b.columns, true, a, b);
    }
    let mut wide = vec![0.0; sum.len()];
    wide.par_chunks_mut(CHUNK)
        .zip(sum.par_chunks(CHUNK))
        .for_each(|(wide, sum)| S::widen(sum, wide));
    matmul(&mut wide, b.columns, true, a, b);
    sum.copy_from_slice(&S::rounded(wide));
}

/// Returns `a b`, rounded.
pub(crate) fn product<T: Element>(a: &Tensor, b: &Tensor) -> Result<Vec<T>> {
    with_matrices::<T, _>(a, b, |a, b| {
        let mut product = vec![0.0; a.rows * b.columns];
        matmul(&mut product, b.columns, false, a, b);
        Ok(T::rounded(product))
    })
}

/// Calls `multiply` with two tensors' matrices.
fn with_matrices<T: Element, R>(
    a: &Tensor,
    b: &Tensor,
    multiply: impl FnOnce(Matrix, Matrix) -> Result<R>,
) -> Result<R> {
    let (a_storage, a_layout) = a.storage_and_layout();
    let (b_storage, b_layout) = b.storage_and_layout();
    let (mut a_buffer, mut b_buffer) = (Vec::new(), Vec::new());
    let values = slice::on_cpu(&a_storage)?.as_slice::<T>()?;
    let a = Matrix::from_layout(values, a_layout, &mut a_buffer)?;
    let values = slice::on_cpu(&b_storage)?.as_slice::<T>()?;
    let b = Matrix::from_layout(values, b_layout, &mut b_buffer)?;
    multiply(a, b)
}
