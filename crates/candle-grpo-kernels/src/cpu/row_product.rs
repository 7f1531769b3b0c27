//! One or two rows times columns whose values are adjacent in memory.
//!
//! The time is dominated by reading the columns, once and in order. They are transposed in
//! registers and multiplied there. Each entry is the same multiply-add chain as in
//! [`matmul`](super::matmul).

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::element::Element;
use super::matrix::Matrix;
use super::transpose::avx2::{LANES, number, prefetch_next, transposed};
use super::word::Numbers;

/// Number of column vectors to multiply together, which hides the latency of additions.
const VECTORS: usize = 2;

/// Columns per step.
const STEP: usize = VECTORS * LANES;

/// Some rows times some columns. Requires AVX2 and FMA.
pub(super) struct RowProduct<'a> {
    pub(super) rows: &'a [f32],
    /// Number of rows, up to [`MOST`](Self::MOST).
    pub(super) count: usize,
    /// Row stride.
    pub(super) stride: usize,
    /// All columns, as rows.
    pub(super) columns: Matrix<'a>,
    pub(super) range: Range<usize>,
    /// First entry in the target, which is in bounds. No other task has these entries.
    pub(super) target: *mut f32,
    pub(super) target_stride: usize,
    pub(super) add: bool,
}

impl RowProduct<'_> {
    /// Maximum number of rows.
    pub(super) const MOST: usize = 2;

    pub(super) fn run(&self) {
        let depth = self.columns.columns;
        assert!(self.columns.in_bounds() && self.range.end <= self.columns.rows);
        assert!(self.columns.column_stride == 1);
        assert!(self.count == 0 || (self.count - 1) * self.stride + depth <= self.rows.len());
        for first in self.range.clone().step_by(STEP) {
            // SAFETY: the processor has AVX2, and the assertions keep rows and columns in bounds.
            #[allow(unsafe_code)]
            unsafe {
                match (self.count, self.columns.numbers) {
                    (1, Numbers::Singles(numbers)) => self.step::<f32, 1, 1>(numbers, first),
                    (1, Numbers::Halves(numbers)) => self.step::<bf16, 1, 2>(numbers, first),
                    (2, Numbers::Singles(numbers)) => self.step::<f32, 2, 1>(numbers, first),
                    (2, Numbers::Halves(numbers)) => self.step::<bf16, 2, 2>(numbers, first),
                    _ => {}
                }
            }
        }
    }

    /// Multiplies the R rows by one step of columns, whose words have N values.
    ///
    /// # Safety
    ///
    /// The processor must have AVX2 and FMA, and rows and columns must be in bounds.
    #[target_feature(enable = "avx2,fma")]
    #[allow(unsafe_code)]
    unsafe fn step<T: Element, const R: usize, const N: usize>(&self, numbers: &[T], first: usize) {
        let depth = self.columns.columns;
        let stride = self.columns.row_stride;
        let count = STEP.min(self.range.end - first);
        // Lanes after the last column repeat it.
        let column = |at: usize| {
            numbers
                .as_ptr()
                .wrapping_add((first + at.min(count - 1)) * stride)
        };
        let row = |row: usize| self.rows.as_ptr().wrapping_add(row * self.stride);
        let target = |row: usize| {
            self.target
                .wrapping_add(row * self.target_stride + first - self.range.start)
        };
        let mut buffer = [[0f32; STEP]; R];
        if self.add {
            for (at, buffer) in buffer.iter_mut().enumerate() {
                // SAFETY: the target has `count` entries here.
                let target = unsafe { std::slice::from_raw_parts(target(at), count) };
                buffer[..count].copy_from_slice(target);
            }
        }
        let mut sums = [[_mm256_setzero_ps(); VECTORS]; R];
        for (sums, buffer) in sums.iter_mut().zip(&buffer) {
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the buffer has whole vectors.
                *sum = unsafe { _mm256_loadu_ps(buffer.as_ptr().add(v * LANES)) };
            }
        }
        let of_square = LANES * N;
        let whole = depth / of_square * of_square;
        for k in (0..whole).step_by(of_square) {
            for v in 0..VECTORS {
                // SAFETY: the words in both columns and rows are in bounds.
                unsafe {
                    let words = |at: usize| column(v * LANES + at).wrapping_add(k).cast::<f32>();
                    let square = transposed(words);
                    prefetch_next(column(v * LANES).wrapping_add(k), stride, STEP);
                    for (at, &words) in square.iter().enumerate() {
                        for index in 0..N {
                            let b = number::<N>(words, index);
                            for r in 0..R {
                                let a = row(r).add(k + at * N + index);
                                let a = _mm256_broadcast_ss(&*a);
                                sums[r][v] = _mm256_fmadd_ps(a, b, sums[r][v]);
                            }
                        }
                    }
                }
            }
        }
        for (sums, buffer) in sums.iter().zip(&mut buffer) {
            for (v, &sum) in sums.iter().enumerate() {
                // SAFETY: the buffer has whole vectors.
                unsafe { _mm256_storeu_ps(buffer.as_mut_ptr().add(v * LANES), sum) };
            }
        }
        for (r, buffer) in buffer.iter_mut().enumerate() {
            for (at, sum) in buffer[..count].iter_mut().enumerate() {
                for k in whole..depth {
                    // SAFETY: the rows and columns have these values.
                    let (a, b) = unsafe { (*row(r).add(k), (*column(at).add(k)).wide()) };
                    *sum = a.mul_add(b, *sum);
                }
            }
            // SAFETY: the target has `count` entries here, which only this task writes.
            let target = unsafe { std::slice::from_raw_parts_mut(target(r), count) };
            target.copy_from_slice(&buffer[..count]);
        }
    }
}
