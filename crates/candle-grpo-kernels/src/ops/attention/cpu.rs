//! The CPU path of [`attention`](crate::attention()).
//!
//! A task computes one key head in one sequence, with the query heads that share it. It processes
//! queries in tiles whose scores fit in the cache, up to the tile's last visible position. The
//! backward pass recomputes the scores.

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{Attention, Sequence, Sizes};
use crate::Scores;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::matmul::matmul_on_one_core;
use crate::cpu::matrix::Matrix;
use crate::cpu::simd::{EXP_UNDERFLOW, LaneSums, MAX_LANES, at_least, dot, exp};
use crate::cpu::{output, slice};
use crate::ops::soft_cap::cpu::{CapBackwardRow, CapRow};

/// Approximate rows per tile. A row is a query head at a position.
const TILE_ROWS: usize = 96;

/// Contiguous inputs to [`attention`](crate::attention()).
pub(crate) struct Inputs<'a, T> {
    pub(crate) query: &'a [T],
    pub(crate) key: &'a [T],
    pub(crate) value: &'a [T],
}

/// Returns the attended values, with the length of `query`.
pub(crate) fn forward<T: Element>(inputs: &Inputs<T>, op: &Attention) -> Result<Vec<T>> {
    slice::read::<u8, _>(&op.table.mask, |mask| {
        let fill = |y: &mut [MaybeUninit<T>]| {
            by_key_head(y, op, |sequence| sequence.new)
                .into_par_iter()
                .enumerate()
                .for_each_init(
                    || Scratch::new(op),
                    |scratch, (index, y)| Task::new(index, inputs, mask, op).forward(scratch, y),
                );
        };
        // SAFETY: the tasks partition the result, and each writes its whole part.
        #[allow(unsafe_code)]
        Ok(unsafe { output::filled(inputs.query.len(), fill) })
    })
}

/// Returns the gradients with respect to `query`, `key` and `value`, in their shapes.
pub(crate) fn backward<T: Element>(
    inputs: [&Tensor; 3],
    gradient: &Tensor,
    op: &Attention,
) -> Result<[Tensor; 3]> {
    let gradients = slice::read::<T, _>(inputs[0], |query| {
        slice::read::<T, _>(inputs[1], |key| {
            slice::read::<T, _>(inputs[2], |value| {
                slice::read::<T, _>(gradient, |gradient| {
                    slice::read::<u8, _>(&op.table.mask, |mask| {
                        let inputs = Inputs { query, key, value };
                        Ok(backward_of_slices(&inputs, gradient, mask, op))
                    })
                })
            })
        })
    })?;
    let [query, key, value] = gradients;
    Ok([
        Tensor::from_vec(query, inputs[0].shape(), &Device::Cpu)?,
        Tensor::from_vec(key, inputs[1].shape(), &Device::Cpu)?,
        Tensor::from_vec(value, inputs[2].shape(), &Device::Cpu)?,
    ])
}

fn backward_of_slices<T: Element>(
    inputs: &Inputs<T>,
    gradient: &[T],
    mask: &[u8],
    op: &Attention,
) -> [Vec<T>; 3] {
    let mut key_and_value_gradients = (Vec::new(), Vec::new());
    let fill = |query_gradient: &mut [MaybeUninit<T>]| {
        let fill = |key_gradient: &mut [MaybeUninit<T>], value_gradient: &mut [MaybeUninit<T>]| {
            let query_gradient = by_key_head(query_gradient, op, |sequence| sequence.new);
            let key_gradient = by_key_head(key_gradient, op, |sequence| sequence.total);
            let value_gradient = by_key_head(value_gradient, op, |sequence| sequence.total);
            let outputs = query_gradient
                .into_par_iter()
                .zip(key_gradient.into_par_iter().zip(value_gradient));
            outputs.enumerate().for_each_init(
                || (Scratch::new(op), BackwardScratch::new(op)),
                |(scratch, more), (index, (query_gradient, (key_gradient, value_gradient)))| {
                    Task::new(index, inputs, mask, op).backward(
                        scratch,
                        more,
                        gradient,
                        [query_gradient, key_gradient, value_gradient],
                    );
                },
            );
        };
        // SAFETY: the tasks partition both results, and each writes all its parts.
        #[allow(unsafe_code)]
        unsafe {
            key_and_value_gradients = output::two_filled(inputs.key.len(), fill);
        }
    };
    // SAFETY: the tasks partition the result, and each writes its whole part.
    #[allow(unsafe_code)]
    let query_gradient = unsafe { output::filled(inputs.query.len(), fill) };
    [
        query_gradient,
        key_and_value_gradients.0,
        key_and_value_gradients.1,
    ]
}

/// Returns each task's part, as one slice per position. `rows` is
/// `[positions in all sequences, kv_heads * ..]`.
fn by_key_head<'a, X>(
    mut rows: &'a mut [X],
    op: &Attention,
    positions: impl Fn(&Sequence) -> usize,
) -> Vec<Vec<&'a mut [X]>> {
    let kv_heads = op.sizes.kv_heads;
    let all: usize = op.table.sequences.iter().map(&positions).sum();
    let piece = rows.len() / (all * kv_heads).max(1);
    let mut parts = Vec::with_capacity(op.table.sequences.len() * kv_heads);
    for sequence in op.table.sequences.iter() {
        let positions = positions(sequence);
        let (own, rest) = std::mem::take(&mut rows).split_at_mut(positions * kv_heads * piece);
        rows = rest;
        let first = parts.len();
        parts.extend((0..kv_heads).map(|_| Vec::with_capacity(positions)));
        for (index, slice) in own.chunks_exact_mut(piece.max(1)).enumerate() {
            parts[first + index % kv_heads].push(slice);
        }
    }
    parts
}

/// A task's buffers in both passes.
struct Scratch {
    /// `[T, head_dim]`, 0 at padding, like `values`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// 0 at an unmasked position, minus infinity at padding; padded to whole vectors.
    bias: Vec<f32>,
    /// `[rows, head_dim]`, already scaled.
    queries: Vec<f32>,
    /// `[rows, stride]`: scores, then their softmax.
    weights: Vec<f32>,
    /// `[rows, head_dim]`
    result: Vec<f32>,
}

/// A task's additional buffers in the backward pass.
struct BackwardScratch {
    /// `[T, head_dim]`
    key_gradients: Vec<f32>,
    value_gradients: Vec<f32>,
    /// `[rows, head_dim]`: the gradient with respect to the result.
    result_gradient: Vec<f32>,
    /// `[rows, stride]`: the gradient with respect to the weights, then the scores.
    scores_gradient: Vec<f32>,
    /// `[rows, stride]`: the capped scores. Empty without a cap.
    capped: Vec<f32>,
}

impl Scratch {
    fn new(op: &Attention) -> Self {
        let sizes = &op.sizes;
        let (stride, rows) = (stride(sizes.total), tile(sizes) * sizes.group);
        Self {
            keys: vec![0.0; sizes.total * sizes.head_dim],
            values: vec![0.0; sizes.total * sizes.head_dim],
            bias: vec![0.0; stride],
            queries: vec![0.0; rows * sizes.head_dim],
            weights: vec![0.0; rows * stride],
            result: vec![0.0; rows * sizes.head_dim],
        }
    }
}

impl BackwardScratch {
    fn new(op: &Attention) -> Self {
        let sizes = &op.sizes;
        let rows = tile(sizes) * sizes.group;
        let scores = rows * stride(sizes.total);
        Self {
            key_gradients: vec![0.0; sizes.total * sizes.head_dim],
            value_gradients: vec![0.0; sizes.total * sizes.head_dim],
            result_gradient: vec![0.0; rows * sizes.head_dim],
            scores_gradient: vec![0.0; scores],
            capped: vec![0.0; if op.scores.cap.is_some() { scores } else { 0 }],
        }
    }
}

/// Returns the stride for rows with `scores` entries: whole vectors.
fn stride(scores: usize) -> usize {
    scores.next_multiple_of(MAX_LANES)
}

/// Returns the number of positions per tile.
fn tile(sizes: &Sizes) -> usize {
    (TILE_ROWS / sizes.group).clamp(1, sizes.new.max(1))
}

/// One key head in one sequence.
struct Task<'a, T> {
    inputs: &'a Inputs<'a, T>,
    /// `[T]`
    mask: &'a [u8],
    scores: &'a Scores,
    sizes: &'a Sizes,
    sequence: Sequence,
    kv_head: usize,
}

impl<'a, T: Element> Task<'a, T> {
    fn new(index: usize, inputs: &'a Inputs<T>, mask: &'a [u8], op: &'a Attention) -> Self {
        let sizes = &op.sizes;
        let sequence = op.table.sequences[index / sizes.kv_heads];
        Self {
            inputs,
            mask: &mask[sequence.first_key..][..sequence.total],
            scores: &op.scores,
            sizes,
            sequence,
            kv_head: index % sizes.kv_heads,
        }
    }

    fn forward(&self, scratch: &mut Scratch, mut y: Vec<&mut [MaybeUninit<T>]>) {
        self.load_keys(scratch);
        let tile = tile(self.sizes);
        for (index, y) in y.chunks_mut(tile).enumerate() {
            let tile = self.softmax(scratch, &mut [], index * tile, y.len());
            let head_dim = self.sizes.head_dim;
            matmul_on_one_core(
                &mut scratch.result,
                head_dim,
                false,
                tile.matrix(&scratch.weights),
                tile.seen(&scratch.values, head_dim),
            );
            self.write_queries(&scratch.result, tile.first, y);
        }
    }

    fn backward(
        &self,
        scratch: &mut Scratch,
        more: &mut BackwardScratch,
        gradient: &[T],
        [mut query_gradient, key_gradient, value_gradient]: [Vec<&mut [MaybeUninit<T>]>; 3],
    ) {
        self.load_keys(scratch);
        more.key_gradients.fill(0.0);
        more.value_gradients.fill(0.0);
        let (tile, head_dim) = (tile(self.sizes), self.sizes.head_dim);
        for (index, query_gradient) in query_gradient.chunks_mut(tile).enumerate() {
            let len = query_gradient.len();
            let tile = self.softmax(scratch, &mut more.capped, index * tile, len);
            self.load_queries(
                gradient,
                tile.first,
                &mut more.result_gradient,
                query_gradient.len(),
            );
            let rows = |values| Matrix::new(values, tile.rows, head_dim, head_dim);
            let first_seen = tile.begin * head_dim;

            let weights = tile.matrix(&scratch.weights);
            let result_gradient = rows(&more.result_gradient);
            matmul_on_one_core(
                &mut more.value_gradients[first_seen..],
                head_dim,
                true,
                weights.t(),
                result_gradient,
            );
            let values = tile.seen(&scratch.values, head_dim).t();
            matmul_on_one_core(
                &mut more.scores_gradient,
                tile.stride,
                false,
                result_gradient,
                values,
            );
            for (weights, scores_gradient) in scratch
                .weights
                .chunks_exact(tile.stride)
                .zip(more.scores_gradient.chunks_exact_mut(tile.stride))
                .take(tile.rows)
            {
                scores_gradient[tile.seen..].fill(0.0);
                vectors().dispatch(SoftmaxBackwardRow {
                    weights,
                    scores_gradient,
                });
            }
            if let Some(cap) = self.scores.cap {
                let scores = tile.rows * tile.stride;
                vectors().dispatch(CapBackwardRow {
                    capped: &more.capped[..scores],
                    scores_gradient: &mut more.scores_gradient[..scores],
                    cap: cap as f32,
                });
            }
            let scores_gradient = tile.matrix(&more.scores_gradient);
            let queries = rows(&scratch.queries);
            matmul_on_one_core(
                &mut more.key_gradients[first_seen..],
                head_dim,
                true,
                scores_gradient.t(),
                queries,
            );
            let keys = tile.seen(&scratch.keys, head_dim);
            matmul_on_one_core(&mut scratch.result, head_dim, false, scores_gradient, keys);
            for x in &mut scratch.result[..tile.rows * head_dim] {
                *x *= self.scores.scale as f32;
            }
            self.write_queries(&scratch.result, tile.first, query_gradient);
        }
        for (sums, pieces) in [
            (&more.key_gradients, key_gradient),
            (&more.value_gradients, value_gradient),
        ] {
            for (sum, piece) in sums.chunks_exact(head_dim).zip(pieces) {
                T::write(sum, piece);
            }
        }
    }

    /// Loads the keys, values and bias.
    fn load_keys(&self, scratch: &mut Scratch) {
        let head_dim = self.sizes.head_dim;
        let width = self.sizes.kv_heads * head_dim;
        let first = self.sequence.first_key * width + self.kv_head * head_dim;
        for (source, target) in [
            (self.inputs.key, &mut scratch.keys),
            (self.inputs.value, &mut scratch.values),
        ] {
            let rows = target.chunks_exact_mut(head_dim).zip(self.mask);
            for (position, (row, &real)) in rows.enumerate() {
                if real == 0 {
                    row.fill(0.0);
                } else {
                    T::widen(&source[first + position * width..][..head_dim], row);
                }
            }
        }
        for (bias, &real) in scratch.bias.iter_mut().zip(self.mask) {
            *bias = if real == 0 { f32::NEG_INFINITY } else { 0.0 };
        }
    }

    /// Copies this task's heads at `len` new positions starting at `first`, with zeros at padding.
    fn load_queries(&self, source: &[T], first: usize, target: &mut [f32], len: usize) {
        let piece = self.sizes.group * self.sizes.head_dim;
        for (position, row) in (first..first + len).zip(target.chunks_exact_mut(piece)) {
            if self.is_real(position) {
                let row_of_source = self.sequence.first_query + position;
                let begin = (row_of_source * self.sizes.kv_heads + self.kv_head) * piece;
                T::widen(&source[begin..][..piece], row);
            } else {
                row.fill(0.0);
            }
        }
    }

    /// Inverts [`load_queries`](Self::load_queries).
    fn write_queries(&self, source: &[f32], first: usize, target: &mut [&mut [MaybeUninit<T>]]) {
        let piece = self.sizes.group * self.sizes.head_dim;
        for (position, (row, target)) in source.chunks_exact(piece).zip(target).enumerate() {
            if self.is_real(first + position) {
                T::write(row, target);
            } else {
                target.fill(MaybeUninit::new(T::nearest(0.0)));
            }
        }
    }

    /// Returns whether a new position is not padding.
    fn is_real(&self, position: usize) -> bool {
        self.mask[self.sequence.past() + position] != 0
    }

    /// Loads the queries at `len` positions starting at `first`, and computes their weights. Copies
    /// the capped scores to `capped`, if there is a cap and enough space.
    fn softmax(&self, scratch: &mut Scratch, capped: &mut [f32], first: usize, len: usize) -> Tile {
        let head_dim = self.sizes.head_dim;
        self.load_queries(self.inputs.query, first, &mut scratch.queries, len);
        for x in &mut scratch.queries {
            *x *= self.scores.scale as f32;
        }
        let past = self.sequence.past();
        let first_visible = self.scores.first_visible(past + first + 1);
        // The bias is read in whole vectors.
        let begin = first_visible / MAX_LANES * MAX_LANES;
        let seen = past + first + len - begin;
        let tile = Tile {
            first,
            rows: len * self.sizes.group,
            begin,
            seen,
            stride: stride(seen),
        };
        matmul_on_one_core(
            &mut scratch.weights,
            tile.stride,
            false,
            Matrix::new(&scratch.queries, tile.rows, head_dim, head_dim),
            tile.seen(&scratch.keys, head_dim).t(),
        );
        let rows = scratch
            .weights
            .chunks_exact_mut(tile.stride)
            .take(tile.rows);
        for (row, scores) in rows.enumerate() {
            if let Some(cap) = self.scores.cap {
                let cap = cap as f32;
                // Entries after the last key are arbitrary, and are not copied.
                scores[seen..].fill(0.0);
                vectors().dispatch(CapRow { scores, cap });
                if let Some(capped) = capped.chunks_exact_mut(tile.stride).nth(row) {
                    capped.copy_from_slice(scores);
                }
            }
            let end = past + first + row / self.sizes.group + 1;
            scores[..self.scores.first_visible(end) - begin].fill(f32::NEG_INFINITY);
            scores[end - begin..].fill(f32::NEG_INFINITY);
            vectors().dispatch(SoftmaxRow {
                scores,
                bias: &scratch.bias[begin..][..tile.stride],
            });
        }
        tile
    }
}

/// Scores for some queries.
#[derive(Clone, Copy)]
struct Tile {
    /// First new position.
    first: usize,
    /// Number of query heads times positions.
    rows: usize,
    /// First position with a score.
    begin: usize,
    /// Number of positions from there that are visible to the last query or an earlier one.
    seen: usize,
    /// Row stride.
    stride: usize,
}

impl Tile {
    fn matrix<'a>(&self, scores: &'a [f32]) -> Matrix<'a> {
        Matrix::new(scores, self.rows, self.seen, self.stride)
    }

    /// The rows in `[T, head_dim]` at the scored positions.
    fn seen<'a>(&self, rows: &'a [f32], head_dim: usize) -> Matrix<'a> {
        Matrix::new(
            &rows[self.begin * head_dim..],
            self.seen,
            head_dim,
            head_dim,
        )
    }
}

/// Replaces scores by their softmax, or by zeros if all scores are minus infinity. Rows consist of
/// whole vectors.
pub(crate) struct SoftmaxRow<'a> {
    pub(crate) scores: &'a mut [f32],
    pub(crate) bias: &'a [f32],
}

impl WithSimd for SoftmaxRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (scores, _) = S::as_mut_simd_f32s(self.scores);
        let (bias, _) = S::as_simd_f32s(self.bias);
        let mut largest = simd.splat_f32s(f32::NEG_INFINITY);
        for (x, &bias) in scores.iter_mut().zip(bias) {
            *x = simd.add_f32s(*x, bias);
            largest = simd.max_f32s(largest, *x);
        }
        // Finite, so that a row filled with minus infinity gives zeros.
        let largest = simd.splat_f32s(simd.reduce_max_f32s(largest).max(f32::MIN));
        let mut sums = LaneSums::<S>::zeros(simd);
        for x in scores.chunks_exact_mut(LaneSums::<S>::PARTS) {
            for part in 0..LaneSums::<S>::PARTS {
                let difference = simd.sub_f32s(x[part], largest);
                x[part] = exp(simd, at_least(simd, difference, EXP_UNDERFLOW - 1.0));
                sums.parts[part] = simd.add_f32s(sums.parts[part], x[part]);
            }
        }
        let sum = sums.total(simd);
        let scale = simd.splat_f32s(if sum == 0.0 { 0.0 } else { sum.recip() });
        for x in scores {
            *x = simd.mul_f32s(*x, scale);
        }
    }
}

/// Replaces the weight gradient by the score gradient, `w (g - sum(w g))`. Rows consist of whole
/// vectors.
struct SoftmaxBackwardRow<'a> {
    weights: &'a [f32],
    scores_gradient: &'a mut [f32],
}

impl WithSimd for SoftmaxBackwardRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let sum = simd.splat_f32s(dot(simd, self.weights, self.scores_gradient));
        let (weights, _) = S::as_simd_f32s(self.weights);
        let (gradients, _) = S::as_mut_simd_f32s(self.scores_gradient);
        for (&weight, gradient) in weights.iter().zip(gradients) {
            *gradient = simd.mul_f32s(weight, simd.sub_f32s(*gradient, sum));
        }
    }
}
