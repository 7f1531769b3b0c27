//! The CPU path of [`linear_log_prob`](crate::linear_log_prob).
//!
//! Computes the logits tile by tile in one buffer. The forward pass reads a tile, and the backward
//! pass replaces it by its gradient, while it is in the caches. The buffer is either the end of a
//! new weight gradient, which is written from the start, or a small allocation.

use std::mem;
use std::ops::Range;

use candle_core::{DType, Result};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{LinearLogProb, Wanted};
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::matmul::matmul;
use crate::cpu::matrix::Matrix;
use crate::cpu::simd::{BLOCK, MAX_LANES};
use crate::cpu::word::{Numbers, multiplies_pairs};
use crate::ops::log_prob::cpu::{Coefficients, ForwardRow, Sums};
use crate::ops::log_prob::{Backward, Rows};
use crate::ops::soft_cap::cpu::{CapBackwardRow, CapRow};

/// Maximum rows per tile. One product sums the weight gradient over them.
const TILE_ROWS: usize = 1024;

/// Maximum logits per tile, 8 MiB in f32, unless a column block has more.
const TILE_LOGITS: usize = 1 << 21;

/// Maximum weight entries at a tile's columns, 8 MiB in f32, unless a column block has more.
const TILE_WEIGHTS: usize = 1 << 21;

/// Maximum logits per tile at the last columns, 1 MiB in f32. These tiles do not fit in the weight
/// gradient.
const LAST_TILE_LOGITS: usize = 1 << 18;

/// Bias columns that one core sums at a time.
const BIAS_COLUMNS: usize = 256;

impl LinearLogProb {
    /// Returns the bytes of its buffers on the CPU, without those of matrix products, for `rows`
    /// rows, a weight `[vocab, width]`, and operands in `dtype`.
    ///
    /// A new weight gradient is a buffer, too. Set `has_new_gradient` if the weight trains without
    /// a [sum](Self::with_weight_sum).
    pub fn cpu_bytes(
        rows: usize,
        (vocab, width): (usize, usize),
        dtype: DType,
        has_new_gradient: bool,
    ) -> usize {
        let logits = rows.saturating_mul(vocab).min(TILE_LOGITS);
        let own_logits = if has_new_gradient {
            logits.min(LAST_TILE_LOGITS)
        } else {
            logits
        };
        // The unmasked rows of a tile.
        let hidden = TILE_ROWS.min(rows) * width;
        let singles = 4 * (own_logits + hidden);
        if dtype == DType::F32 {
            return singles;
        }
        // The logit gradient in bf16, or the operands in f32.
        let weight = TILE_WEIGHTS.min(vocab * width);
        singles + (2 * logits).max(4 * (weight + hidden))
    }
}

/// Hidden states `[K, H]` for the kept rows, the weight `[V, H]` and the bias `[V]`.
pub(crate) struct Layer<'a, W> {
    pub(crate) hidden: &'a States<'a>,
    pub(crate) weight: &'a [W],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) vocab: usize,
    pub(crate) width: usize,
    /// Logit soft cap.
    pub(crate) logit_cap: Option<f64>,
}

/// Requested gradients; the others are empty.
pub(crate) struct Gradients {
    /// `[N, H]`
    pub(crate) hidden: Vec<f32>,
    /// `[V, H]`, empty if it has been added to a sum.
    pub(crate) weight: Vec<f32>,
    /// `[V]`
    pub(crate) bias: Vec<f32>,
}

/// Returns log-probs, entropy and log-sum-exp, `[3, N]`.
pub(crate) fn forward<W: Element>(layer: &Layer<W>, kept: &Kept, rows: &Rows) -> Result<Vec<f32>> {
    rows.read(|targets, _| {
        let inverse_temperature = rows.inverse_temperature;
        // Each row's sums, and its target's logit.
        let mut seen = vec![(Sums::default(), f32::NAN); kept.rows.len()];
        layer.for_each_tile(kept, WeightGradient::None, |tile| {
            let columns = &tile.columns;
            tile.logits
                .par_chunks_exact(tile.stride)
                .zip(&mut seen[tile.rows.clone()])
                .zip(&kept.rows[tile.rows])
                .for_each(|((logits, (sums, target_logit)), &row)| {
                    let logits = &logits[..columns.len()];
                    *sums = vectors().dispatch(ForwardRow {
                        logits,
                        inverse_temperature,
                        sums: *sums,
                    });
                    let target = targets[row] as usize;
                    if columns.contains(&target) {
                        *target_logit = logits[target - columns.start];
                    }
                });
        });
        let mut packed = vec![0.0; 3 * kept.among];
        for (&row, (sums, target_logit)) in kept.rows.iter().zip(seen) {
            let results = sums.finish(f64::from(target_logit), inverse_temperature);
            for (part, result) in results.into_iter().enumerate() {
                packed[part * kept.among + row] = result;
            }
        }
        packed
    })
}

/// Returns the requested gradients, given the result gradients in `pass`. Adds the weight gradient
/// to `weight_sum` if that is given.
pub(crate) fn backward<W: Element>(
    layer: &Layer<W>,
    kept: &Kept,
    pass: &Backward,
    wanted: Wanted,
    weight_sum: Option<&mut [f32]>,
) -> Result<Gradients> {
    let coefficients: Vec<Coefficients> = pass.read(|coefficients| {
        kept.rows
            .iter()
            .filter_map(|&row| coefficients(row))
            .collect()
    })?;
    let &Layer {
        vocab,
        width,
        logit_cap,
        ..
    } = layer;
    let len = |wanted: bool, len: usize| if wanted { len } else { 0 };
    // Kept rows come first, and move to their places at the end.
    let mut hidden_gradient = vec![0.0; len(wanted.hidden, kept.among * width)];
    let adds = weight_sum.is_some();
    let mut weight_gradient = vec![0.0; len(wanted.weight && !adds, vocab * width)];
    let mut bias_gradient = vec![0.0; len(wanted.bias, vocab)];
    // Logit gradient for a tile, if products are in bf16.
    let mut halves = Vec::new();

    let target = match weight_sum {
        Some(sum) => WeightGradient::Sum(sum),
        None if wanted.weight => WeightGradient::New(&mut weight_gradient),
        None => WeightGradient::None,
    };
    layer.for_each_tile(kept, target, |tile| {
        let Tile {
            columns,
            rows,
            logits,
            stride,
            weight,
            weight_gradient,
            hidden,
        } = tile;
        logits
            .par_chunks_exact_mut(stride)
            .zip(&coefficients[rows.clone()])
            .for_each(|(logits, coefficients)| {
                vectors().dispatch(BackwardRow {
                    logits,
                    coefficients,
                    start: columns.start,
                    logit_cap,
                });
            });
        let numbers = match hidden {
            Numbers::Singles(_) => Numbers::Singles(logits),
            Numbers::Halves(_) => {
                halves.resize(logits.len(), bf16::ZERO);
                halves
                    .par_chunks_mut(stride)
                    .zip(logits.par_chunks(stride))
                    .for_each(|(halves, logits)| halves.convert_from_f32_slice(logits));
                Numbers::Halves(&halves)
            }
        };
        let gradient = Matrix::of(numbers, rows.len(), columns.len(), stride);
        if wanted.hidden {
            let target = &mut hidden_gradient[rows.start * width..rows.end * width];
            let weight = Matrix::of(weight, columns.len(), width, width);
            matmul(target, width, true, gradient, weight);
        }
        if wanted.weight {
            let hidden = Matrix::of(hidden, rows.len(), width, width);
            let adds = adds || rows.start > 0;
            matmul(weight_gradient, width, adds, gradient.t(), hidden);
        }
        if wanted.bias {
            bias_gradient[columns]
                .par_chunks_mut(BIAS_COLUMNS)
                .enumerate()
                .for_each(|(chunk, sums)| {
                    for row in logits.chunks_exact(stride) {
                        for (sum, x) in sums.iter_mut().zip(&row[chunk * BIAS_COLUMNS..]) {
                            *sum += x;
                        }
                    }
                });
        }
    });
    if wanted.hidden {
        kept.spread(&mut hidden_gradient, width);
    }
    Ok(Gradients {
        hidden: hidden_gradient,
        weight: weight_gradient,
        bias: bias_gradient,
    })
}

/// The unmasked rows. Masked rows are left out of all products.
pub(crate) struct Kept {
    rows: Vec<usize>,
    /// Total number of rows.
    among: usize,
}

impl Kept {
    pub(crate) fn new(rows: &Rows) -> Result<Self> {
        rows.read(|targets, kept| Self {
            rows: (0..targets.len()).filter(|&row| kept(row)).collect(),
            among: targets.len(),
        })
    }

    fn all(&self) -> bool {
        self.rows.len() == self.among
    }

    /// Returns these rows of `values`, `[N, width]`, for products with a weight in dtype `weight`.
    pub(crate) fn states<'a, X: Element>(
        &'a self,
        values: &'a [X],
        width: usize,
        weight: DType,
    ) -> States<'a> {
        let halves = match weight {
            DType::BF16 if multiplies_pairs() => X::as_bf16(values),
            _ => None,
        };
        let whole = halves.map(Numbers::Halves);
        let whole = whole.or_else(|| X::as_f32(values).map(Numbers::Singles));
        States {
            whole: whole.filter(|_| self.all()),
            copy: Box::new(move |rows, copy| match halves {
                Some(halves) => {
                    let target = &mut copy.halves;
                    self.copy(halves, width, rows, target, <[bf16]>::copy_from_slice);
                }
                None => {
                    let widen = |target: &mut [f32], source: &[X]| X::widen(source, target);
                    self.copy(values, width, rows, &mut copy.singles, widen);
                }
            }),
            halves: halves.is_some(),
        }
    }

    /// Converts some of these rows from `values` to `target`.
    fn copy<X: Element, Y: Element>(
        &self,
        values: &[X],
        width: usize,
        rows: Range<usize>,
        target: &mut Vec<Y>,
        convert: impl Fn(&mut [Y], &[X]) + Sync,
    ) {
        target.resize(rows.len() * width, Y::nearest(0.0));
        target
            .par_chunks_exact_mut(width)
            .zip(&self.rows[rows])
            .for_each(|(target, &row)| convert(target, &values[row * width..][..width]));
    }

    /// Moves these rows from the start of `values` `[N, width]` to their places, and zeroes the
    /// others.
    fn spread(&self, values: &mut [f32], width: usize) {
        if self.all() {
            return;
        }
        let mut end = self.among;
        // Starts at the last row, because each row moves to a later place.
        for (from, &row) in self.rows.iter().enumerate().rev() {
            values.copy_within(from * width..(from + 1) * width, row * width);
            values[(row + 1) * width..end * width].fill(0.0);
            end = row;
        }
        values[..end * width].fill(0.0);
    }
}

/// Hidden states `[K, H]` for the kept rows.
pub(crate) struct States<'a> {
    /// All rows, if no copy is needed.
    whole: Option<Numbers<'a>>,
    /// Copies a range of rows.
    copy: Box<CopyRows<'a>>,
    /// True if they are bf16.
    halves: bool,
}

type CopyRows<'a> = dyn Fn(Range<usize>, &mut CopiedRows) + 'a;

/// A copy of some rows. One vector holds them, the other is empty.
#[derive(Default)]
struct CopiedRows {
    singles: Vec<f32>,
    halves: Vec<bf16>,
}

impl CopiedRows {
    fn numbers(&self) -> Numbers<'_> {
        if self.halves.is_empty() {
            Numbers::Singles(&self.singles)
        } else {
            Numbers::Halves(&self.halves)
        }
    }
}

/// A part of the logits.
struct Tile<'t> {
    /// Vocabulary columns.
    columns: Range<usize>,
    /// Indices among the kept rows.
    rows: Range<usize>,
    /// Rows of logits that start `stride` apart, a multiple of every vector width. The padding is
    /// arbitrary.
    logits: &'t mut [f32],
    stride: usize,
    /// Weight rows at these columns.
    weight: Numbers<'t>,
    /// Weight gradient rows at these columns. Empty if not requested.
    weight_gradient: &'t mut [f32],
    /// Hidden states for these rows.
    hidden: Numbers<'t>,
}

/// The weight gradient that the visits to the tiles write.
enum WeightGradient<'a> {
    None,
    /// Written from the start. Its end holds the logits as long as they fit after the columns in
    /// their tile. The remaining columns have narrow tiles in a separate buffer.
    New(&'a mut [f32]),
    /// Added to. The logits are in a separate buffer.
    Sum(&'a mut [f32]),
}

/// Tile sizes depend only on the shapes and the requested gradients, for deterministic results.
impl<W: Element> Layer<'_, W> {
    /// Returns how many columns a tile with `rows` rows and about `logits` entries has: a multiple
    /// of `unit`.
    fn tile_columns(&self, rows: usize, logits: usize, unit: usize) -> usize {
        let columns = (logits / rows).min(TILE_WEIGHTS / self.width);
        (columns / unit * unit)
            .max(unit)
            .min(self.vocab.next_multiple_of(MAX_LANES))
    }

    /// Visits all rows at the first columns, then all rows at the next. Without rows there are no
    /// tiles.
    fn for_each_tile(
        &self,
        kept: &Kept,
        weight_gradient: WeightGradient,
        mut visit: impl FnMut(Tile),
    ) {
        let width = self.width;
        let (mut weight_gradient, holds_logits) = match weight_gradient {
            WeightGradient::None => (&mut [][..], false),
            WeightGradient::New(gradient) => (gradient, true),
            WeightGradient::Sum(sum) => (sum, false),
        };
        let tile_rows = kept.rows.len().min(TILE_ROWS);
        if tile_rows == 0 {
            return;
        }
        // A copy of a tile's hidden states, and its rows.
        let (mut copied, mut copied_rows) = (CopiedRows::default(), 0..0);
        // Whole blocks: a row's sums do not depend on the tiles.
        let widest = self.tile_columns(tile_rows, TILE_LOGITS, BLOCK);
        let last = if holds_logits {
            let last = self.tile_columns(tile_rows, LAST_TILE_LOGITS, MAX_LANES);
            last.min(widest)
        } else {
            widest
        };
        let (mut scratch, mut widened) = (Vec::new(), Vec::new());
        let mut start = 0;
        while start < self.vocab {
            // As many columns as leave space for their logits after their gradient.
            let room = weight_gradient.len() / (tile_rows + width) / MAX_LANES * MAX_LANES;
            let stride = room.clamp(last, widest);
            let columns = start..self.vocab.min(start + stride);
            start = columns.end;
            let own = (columns.len() * width).min(weight_gradient.len());
            let (gradient, behind) = mem::take(&mut weight_gradient).split_at_mut(own);
            weight_gradient = behind;
            let needed = tile_rows * stride;
            let begin = weight_gradient.len().checked_sub(needed);
            let logits = match begin.filter(|_| holds_logits) {
                Some(begin) => &mut weight_gradient[begin..],
                None => {
                    if scratch.len() < needed {
                        scratch = vec![0.0; needed];
                    }
                    &mut scratch[..needed]
                }
            };
            let weight = self.weight_at(&columns, &mut widened);
            for rows in ranges(kept.rows.len(), TILE_ROWS) {
                let logits = &mut logits[..rows.len() * stride];
                if let Some(bias) = self.bias {
                    for row in logits.chunks_exact_mut(stride) {
                        row[..columns.len()].copy_from_slice(&bias[columns.clone()]);
                    }
                }
                let hidden = match self.hidden.whole {
                    Some(hidden) => hidden.slice(rows.start * width..rows.end * width),
                    None => {
                        if copied_rows != rows {
                            (self.hidden.copy)(rows.clone(), &mut copied);
                            copied_rows = rows.clone();
                        }
                        copied.numbers()
                    }
                };
                matmul(
                    logits,
                    stride,
                    self.bias.is_some(),
                    Matrix::of(hidden, rows.len(), width, width),
                    Matrix::of(weight, columns.len(), width, width).t(),
                );
                if let Some(cap) = self.logit_cap {
                    let cap = cap as f32;
                    logits
                        .par_chunks_exact_mut(stride)
                        .for_each(|scores| vectors().dispatch(CapRow { scores, cap }));
                }
                visit(Tile {
                    columns: columns.clone(),
                    rows,
                    logits,
                    stride,
                    weight,
                    weight_gradient: gradient,
                    hidden,
                });
            }
        }
    }

    /// Returns the weight at these columns, in `buffer` if needed.
    fn weight_at<'b>(&'b self, columns: &Range<usize>, buffer: &'b mut Vec<f32>) -> Numbers<'b> {
        let weight = &self.weight[columns.start * self.width..columns.end * self.width];
        if self.hidden.halves {
            Numbers::of(weight, buffer)
        } else {
            Numbers::widened(weight, buffer)
        }
    }
}

/// Splits `0..len` into ranges with `step` entries.
fn ranges(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(step)
        .map(move |start| start..len.min(start + step))
}

/// Replaces a tile row, which starts at column `start`, by its gradient.
struct BackwardRow<'a> {
    logits: &'a mut [f32],
    coefficients: &'a Coefficients,
    start: usize,
    logit_cap: Option<f64>,
}

impl WithSimd for BackwardRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Some(cap) = self.logit_cap else {
            return self.coefficients.apply(simd, self.logits, self.start);
        };
        let mut capped = [0.0; BLOCK];
        for (index, logits) in self.logits.chunks_mut(BLOCK).enumerate() {
            let capped = &mut capped[..logits.len()];
            capped.copy_from_slice(logits);
            self.coefficients
                .apply(simd, logits, self.start + index * BLOCK);
            CapBackwardRow {
                capped,
                scores_gradient: logits,
                cap: cap as f32,
            }
            .with_simd(simd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_lie_in_the_gradient_of_the_weight() {
        let (rows, vocab, width) = (1030, 20_000, 64);
        let kept = Kept {
            rows: (0..rows).collect(),
            among: rows,
        };
        let hidden = vec![0f32; rows * width];
        let layer = Layer {
            hidden: &kept.states(&hidden, width, DType::F32),
            weight: &vec![0f32; vocab * width],
            bias: None,
            vocab,
            width,
            logit_cap: None,
        };
        let mut gradient = vec![0.0; vocab * width];
        let end = gradient.as_ptr_range().end;
        let (mut seen, mut inside) = (0, 0);
        layer.for_each_tile(&kept, WeightGradient::New(&mut gradient), |tile| {
            if tile.rows.start == 0 {
                assert_eq!(tile.columns.start, seen);
                seen = tile.columns.end;
                if tile.logits.as_ptr_range().end == end {
                    inside = seen;
                } else {
                    assert!(tile.logits.len() <= LAST_TILE_LOGITS);
                }
            }
        });
        assert_eq!(seen, vocab);
        assert!(inside > vocab / 4 * 3, "{inside} of {vocab} columns");
    }
}
