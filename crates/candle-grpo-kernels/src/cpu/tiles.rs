//! Matrix products of bf16 in the tiles of [AMX](super::amx).

use std::ops::Range;

use half::bf16;
use pulp::{Simd, WithSimd};

use super::amx::{BLOCK, STEP, Tiles};
use super::buffer::{Buffer, Scratch};
use super::matrix::Matrix;
use super::panel::Columns;
use super::simd::{L2, prefetch};
use super::transpose::transpose;
use super::word::Word;

/// A matrix in memory that a task writes.
#[derive(Clone, Copy)]
pub(super) struct TileTarget {
    /// The first entry of the whole product.
    pub(super) first: *mut f32,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
    pub(super) add: bool,
}

impl TileTarget {
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        let offset = row * self.row_stride + column * self.column_stride;
        self.first.wrapping_add(offset)
    }

    /// Calls `visit` with each entry of a part of at most a block, and its index in the block.
    #[inline(always)]
    fn for_each(
        &self,
        rows: &Range<usize>,
        columns: &Range<usize>,
        mut visit: impl FnMut(usize, *mut f32),
    ) {
        for row in rows.clone() {
            for column in columns.clone() {
                let index = (row - rows.start) * BLOCK + column - columns.start;
                visit(index, self.at(row, column));
            }
        }
    }
}

/// Computes some rows of `left` times some panels of `right`.
///
/// Needs AMX. The columns and the target are in bounds, and no other task has these entries.
pub(super) struct RunTiles<'r, 'a, C> {
    pub(super) left: &'r Matrix<'a>,
    pub(super) rows: Range<usize>,
    pub(super) right: &'r C,
    pub(super) panels: &'r [Range<usize>],
    pub(super) target: TileTarget,
    /// Numbers that are packed at a time. A chain continues from the sum in memory.
    pub(super) depth: usize,
    pub(super) scratch: &'r mut Scratch,
}

impl<C: Columns> WithSimd for RunTiles<'_, '_, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            left,
            rows,
            right,
            panels,
            target,
            depth,
            scratch,
        } = self;
        let Some(numbers) = bf16::numbers(left.numbers) else {
            return;
        };
        let Scratch {
            a: packed,
            panel,
            wide,
        } = scratch;
        // SAFETY: the task needs AMX. No other function has `Tiles`, and none of those called here
        // runs another task.
        #[allow(unsafe_code)]
        let tiles = unsafe { Tiles::new() };
        let mut sums = [0.0; BLOCK * BLOCK];
        let parts = left.columns.max(1).div_ceil(depth.max(1));
        for part in 0..parts {
            let inner = part * depth..left.columns.min((part + 1) * depth);
            let words = inner.len().div_ceil(bf16::NUMBERS);
            // At least one step, which writes zeros to the target.
            let steps = words.div_ceil(STEP).max(1);
            let block_len = BLOCK * steps * STEP;
            // Blocks that are read from a copy, with zeros to its end: all, or an incomplete last
            // one.
            let whole = left.column_stride == 1 && inner.len() == bf16::NUMBERS * steps * STEP;
            let copied = if whole {
                rows.end - rows.len() % BLOCK..rows.end
            } else {
                rows.clone()
            };
            let copies = copied.len().div_ceil(BLOCK);
            let packed = packed.first(copies * block_len);
            for (first, copy) in copied
                .clone()
                .step_by(BLOCK)
                .zip(packed.chunks_exact_mut(block_len))
            {
                let rows = first..rows.end.min(first + BLOCK);
                copy_block(numbers, left, &rows, &inner, panel, copy);
            }
            let panel = panel.first(block_len);
            for columns in panels {
                let (used, padding) = panel.split_at_mut(BLOCK * words);
                right.pack::<bf16>(columns, &inner, used, wide);
                padding.fill(0.0);
                for first in rows.clone().step_by(BLOCK) {
                    if whole && panels.len() == 1 {
                        // The rows are read once, from memory.
                        let next = first + BLOCK..rows.end.min(first + 2 * BLOCK);
                        for row in next {
                            let row = &numbers[row * left.row_stride..][inner.clone()];
                            prefetch::<L2, _>(row.as_ptr(), row.len());
                        }
                    }
                    let rows = first..rows.end.min(first + BLOCK);
                    let a = if copied.contains(&first) {
                        let copy = &packed[(first - copied.start) / BLOCK * block_len..];
                        (copy.as_ptr().cast(), steps * STEP * size_of::<f32>())
                    } else {
                        let block = &numbers[first * left.row_stride + inner.start..]
                            [..(BLOCK - 1) * left.row_stride + inner.len()];
                        (block.as_ptr().cast(), left.row_stride * size_of::<bf16>())
                    };
                    let add = target.add || part > 0;
                    let full = rows.len() == BLOCK && columns.len() == BLOCK;
                    // SAFETY: `a` is a block of `left` or of its copy, and the panel has `steps`
                    // steps. The target is in bounds, and nothing else accesses these entries.
                    #[allow(unsafe_code)]
                    unsafe {
                        if full && target.column_stride == 1 {
                            let step = target.row_stride * size_of::<f32>();
                            let at = (target.at(first, columns.start), step);
                            tiles.multiply(a, panel.as_ptr(), steps, at, add);
                            continue;
                        }
                        if add {
                            target.for_each(&rows, columns, |index, entry| sums[index] = *entry);
                        }
                        let at = (sums.as_mut_ptr(), BLOCK * size_of::<f32>());
                        tiles.multiply(a, panel.as_ptr(), steps, at, add);
                        target.for_each(&rows, columns, |index, entry| *entry = sums[index]);
                    }
                }
            }
        }
    }
}

/// Writes the words of up to a block of rows of a matrix to rows of `target`, with zeros after
/// them. `panel` is for its own use.
#[inline(always)]
fn copy_block(
    numbers: &[bf16],
    matrix: &Matrix,
    rows: &Range<usize>,
    inner: &Range<usize>,
    panel: &mut Buffer,
    target: &mut [f32],
) {
    let words = inner.len().div_ceil(bf16::NUMBERS);
    if matrix.column_stride != 1 {
        let panel = panel.first(BLOCK * words);
        matrix.t().pack_words(numbers, rows, inner, panel);
        return transpose::<f32, f32>(panel, BLOCK, words, target, BLOCK);
    }
    let width = target.len() / BLOCK;
    let (used, padding) = target.split_at_mut(rows.len() * width);
    for (row, target) in rows.clone().zip(used.chunks_exact_mut(width)) {
        let numbers = &numbers[row * matrix.row_stride..][inner.clone()];
        let (target, padding) = target.split_at_mut(words);
        for (target, pair) in target.iter_mut().zip(numbers.chunks(bf16::NUMBERS)) {
            *target = bf16::word(pair[0], pair.get(1).copied().unwrap_or(bf16::ZERO));
        }
        padding.fill(0.0);
    }
    padding.fill(0.0);
}
