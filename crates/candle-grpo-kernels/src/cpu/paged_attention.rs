//! The CPU path of [`paged_attention`](crate::paged_attention()).
//!
//! A task computes one key head of one row and the query heads that share it: the scores of all
//! visible positions, their softmax, and the weighted sum of values. Pages are read in place.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::attention::{CapRow, SoftmaxRow};
use super::element::Element;
use super::simd::MAX_LANES;
use super::{output, slice};
use crate::Scores;
use crate::paged_attention::{KeyValuePages, PAGE, PageSlot, PagedRow};

/// Minimum number of products for more than one core.
const WORTH_SHARING: usize = 1 << 18;

/// Vectors of a result that are summed together, which hides the latency of additions.
const SUMS: usize = 4;

/// Query heads whose products with a page are computed together, for the same reason.
const HEADS: usize = 4;

/// Returns the attended values, of the length of a contiguous `query`.
pub(crate) fn forward<T: Element>(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scores: &Scores,
) -> Result<Vec<T>> {
    let (_, kv_heads, _, head_dim) = pages.values().dims4()?;
    slice::read::<T, _>(query, |query| {
        slice::read::<T, _>(pages.keys(), |keys| {
            slice::read::<T, _>(pages.values(), |values| {
                let piece = query.len() / (rows.len() * kv_heads);
                let task = |scratch: &mut Scratch, index: usize, y: &mut [MaybeUninit<T>]| {
                    Arch::new().dispatch(Task {
                        query: &query[index * piece..][..piece],
                        keys,
                        values,
                        row: rows[index / kv_heads],
                        head: index % kv_heads,
                        kv_heads,
                        head_dim,
                        scores,
                        y,
                        scratch,
                    });
                };
                let seen: usize = rows.iter().map(|row| row.visible).sum();
                let fill = |y: &mut [MaybeUninit<T>]| {
                    if seen * piece * kv_heads < WORTH_SHARING {
                        let scratch = &mut Scratch::default();
                        for (index, y) in y.chunks_exact_mut(piece).enumerate() {
                            task(scratch, index, y);
                        }
                    } else {
                        y.par_chunks_exact_mut(piece)
                            .enumerate()
                            .for_each_init(Scratch::default, |scratch, (index, y)| {
                                task(scratch, index, y)
                            });
                    }
                };
                // SAFETY: the tasks partition the result, and each writes its whole part.
                #[allow(unsafe_code)]
                Ok(unsafe { output::filled(query.len(), fill) })
            })
        })
    })
}

/// Writes `rows` `[N, kv_heads * head_dim]` to slots of `pages`. The layout of a head in a page is
/// `[head_dim, PAGE]` if `transposed`, else `[PAGE, head_dim]`.
pub(crate) fn write<T: Element>(
    pages: &mut [T],
    rows: &[T],
    slots: &[PageSlot],
    [kv_heads, head_dim]: [usize; 2],
    transposed: bool,
) {
    for (row, slot) in rows.chunks_exact(kv_heads * head_dim).zip(slots) {
        for (head, row) in row.chunks_exact(head_dim).enumerate() {
            let page =
                &mut pages[(slot.page * kv_heads + head) * head_dim * PAGE..][..head_dim * PAGE];
            if transposed {
                let slots = page.iter_mut().skip(slot.position).step_by(PAGE);
                slots.zip(row).for_each(|(slot, &x)| *slot = x);
            } else {
                page[slot.position * head_dim..][..head_dim].copy_from_slice(row);
            }
        }
    }
}

/// Buffers of a task.
#[derive(Default)]
struct Scratch {
    /// Zeros.
    bias: Vec<f32>,
    /// The scores of each query head, then their softmax, by position.
    weights: Vec<f32>,
    query: Vec<f32>,
    /// The results of the query heads.
    result: Vec<f32>,
    /// A page of one head in f32, unless the pages are f32.
    page: Vec<f32>,
}

/// One key head of one row.
struct Task<'a, T> {
    /// The query heads.
    query: &'a [T],
    keys: &'a [T],
    values: &'a [T],
    row: PagedRow<'a>,
    head: usize,
    kv_heads: usize,
    head_dim: usize,
    scores: &'a Scores,
    y: &'a mut [MaybeUninit<T>],
    scratch: &'a mut Scratch,
}

impl<T: Element> WithSimd for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head_dim, row, .. } = self;
        let heads = self.query.len() / head_dim;
        let scratch = self.scratch;
        scratch.query.resize(self.query.len(), 0.0);
        T::widen(self.query, &mut scratch.query);
        for x in &mut scratch.query {
            *x *= self.scores.scale as f32;
        }
        scratch.result.resize(heads * head_dim, 0.0);
        scratch.result.fill(0.0);
        scratch.page.resize(head_dim * PAGE, 0.0);

        // The position of the first weight. Sums start at a whole vector, as in training.
        let first = self.scores.first_visible(row.visible);
        let begin = first / MAX_LANES * MAX_LANES;
        let width = (row.visible - begin).next_multiple_of(MAX_LANES);
        // The pages with visible positions, these positions of each, and the place of their
        // weights.
        let mut before = 0;
        let spans = row.spans.iter().filter_map(move |span| {
            let start = before;
            let len = span.len.min(row.visible - start);
            let hidden = first.saturating_sub(start);
            before += len;
            (hidden < len).then(|| (span.page, hidden..len, start + hidden - begin))
        });
        scratch.bias.resize(width, 0.0);
        scratch.weights.resize(heads * width, 0.0);
        // Masks the positions before and after the visible ones.
        for weights in scratch.weights.chunks_exact_mut(width) {
            weights[..first - begin].fill(f32::NEG_INFINITY);
            weights[row.visible - begin..].fill(f32::NEG_INFINITY);
        }

        let piece = head_dim * PAGE;
        let place = |page: usize| (page * self.kv_heads + self.head) * piece;
        for (page, visible, at) in spans.clone() {
            let keys = T::widened(&self.keys[place(page)..][..piece], &mut scratch.page);
            for (query, weights) in (scratch.query.chunks(HEADS * head_dim))
                .zip(scratch.weights.chunks_mut(HEADS * width))
            {
                let mut scores = [[0.0; PAGE]; HEADS];
                match query.len() / head_dim {
                    1 => products::<S, 1>(simd, query, keys, &mut scores),
                    2 => products::<S, 2>(simd, query, keys, &mut scores),
                    3 => products::<S, 3>(simd, query, keys, &mut scores),
                    _ => products::<S, HEADS>(simd, query, keys, &mut scores),
                }
                for (scores, weights) in scores.iter_mut().zip(weights.chunks_exact_mut(width)) {
                    if let Some(cap) = self.scores.cap {
                        let cap = cap as f32;
                        CapRow { scores, cap }.with_simd(simd);
                    }
                    weights[at..][..visible.len()].copy_from_slice(&scores[visible.clone()]);
                }
            }
        }
        for scores in scratch.weights.chunks_exact_mut(width) {
            let bias = &scratch.bias;
            SoftmaxRow { scores, bias }.with_simd(simd);
        }
        for (page, visible, at) in spans {
            let values = &self.values[place(page)..][..piece];
            let values = &values[visible.start * head_dim..visible.end * head_dim];
            let values = T::widened(values, &mut scratch.page[..values.len()]);
            for (weights, result) in scratch
                .weights
                .chunks_exact(width)
                .zip(scratch.result.chunks_exact_mut(head_dim))
            {
                mix(simd, &weights[at..][..visible.len()], values, result);
            }
        }
        T::write(&scratch.result, self.y);
    }
}

/// Computes the products of H queries with the keys of a page, `[head_dim, PAGE]`. Each is a chain
/// of multiply-adds, as in the matrix products of training.
#[inline(always)]
fn products<S: Simd, const H: usize>(
    simd: S,
    queries: &[f32],
    keys: &[f32],
    scores: &mut [[f32; PAGE]; HEADS],
) {
    let (keys, _) = S::as_simd_f32s(keys);
    let head_dim = queries.len() / H;
    let queries: [_; H] = std::array::from_fn(|head| &queries[head * head_dim..][..head_dim]);
    let vectors = PAGE / S::F32_LANES;
    for part in 0..vectors {
        let mut sums = [simd.splat_f32s(0.0); H];
        for (i, &key) in keys[part..].iter().step_by(vectors).enumerate() {
            for (sum, query) in sums.iter_mut().zip(queries) {
                *sum = simd.mul_add_e_f32s(simd.splat_f32s(query[i]), key, *sum);
            }
        }
        for (sum, scores) in sums.into_iter().zip(&mut *scores) {
            S::as_mut_simd_f32s(scores).0[part] = sum;
        }
    }
}

/// Adds the weighted values `[len, head_dim]` to `result`.
#[inline(always)]
fn mix<S: Simd>(simd: S, weights: &[f32], values: &[f32], result: &mut [f32]) {
    let head_dim = result.len();
    let (vectors, rest) = S::as_mut_simd_f32s(result);
    let whole = vectors.len() * S::F32_LANES;
    for (index, sums) in vectors.chunks_mut(SUMS).enumerate() {
        let first = index * SUMS * S::F32_LANES;
        if let &mut [a, b, c, d] = &mut *sums {
            let mut four = [a, b, c, d];
            for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
                let weight = simd.splat_f32s(weight);
                let (values, _) = S::as_simd_f32s(&values[first..][..SUMS * S::F32_LANES]);
                for (sum, &value) in four.iter_mut().zip(values) {
                    *sum = simd.mul_add_e_f32s(weight, value, *sum);
                }
            }
            sums.copy_from_slice(&four);
            continue;
        }
        for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
            let weight = simd.splat_f32s(weight);
            let (values, _) = S::as_simd_f32s(&values[first..]);
            for (sum, &value) in sums.iter_mut().zip(values) {
                *sum = simd.mul_add_e_f32s(weight, value, *sum);
            }
        }
    }
    if rest.is_empty() {
        return;
    }
    let mut sum = simd.partial_load_f32s(rest);
    for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
        let values = simd.partial_load_f32s(&values[whole..]);
        sum = simd.mul_add_e_f32s(simd.splat_f32s(weight), values, sum);
    }
    simd.partial_store_f32s(rest, sum);
}
