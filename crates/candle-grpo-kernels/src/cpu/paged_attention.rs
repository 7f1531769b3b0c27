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
use super::{output, slice};
use crate::Scores;
use crate::paged_attention::{KeyValuePages, PAGE, PageSlot, PagedRow};

/// Minimum number of products for more than one core.
const WORTH_SHARING: usize = 1 << 18;

/// Independent partial sums, which hide the latency of additions.
const SUMS: usize = 4;

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
    /// The scores of a query head, then their softmax, with one page for each span.
    weights: Vec<f32>,
    query: Vec<f32>,
    /// The result of one head.
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

        // The pages with visible positions, and these positions of each.
        let first = self.scores.first_visible(row.visible);
        let mut before = 0;
        let spans = row.spans.iter().filter_map(move |span| {
            let len = span.len.min(row.visible - before);
            let hidden = first.saturating_sub(before);
            before += len;
            (hidden < len).then_some((span.page, hidden..len))
        });
        let width = spans.clone().count() * PAGE;
        scratch.bias.resize(width, 0.0);
        scratch.weights.resize(heads * width, 0.0);

        let piece = head_dim * PAGE;
        let place = |page: usize| (page * self.kv_heads + self.head) * piece;
        for (index, (page, visible)) in spans.clone().enumerate() {
            let keys = T::widened(&self.keys[place(page)..][..piece], &mut scratch.page);
            for (query, weights) in scratch
                .query
                .chunks_exact(head_dim)
                .zip(scratch.weights.chunks_exact_mut(width))
            {
                let scores = &mut weights[index * PAGE..][..PAGE];
                products(simd, query, keys, scores);
                if let Some(cap) = self.scores.cap {
                    let cap = cap as f32;
                    CapRow { scores, cap }.with_simd(simd);
                }
                // Masks other positions. Those after the last visible one may hold NaN.
                scores[..visible.start].fill(f32::NEG_INFINITY);
                scores[visible.end..].fill(f32::NEG_INFINITY);
            }
        }
        for scores in scratch.weights.chunks_exact_mut(width) {
            let bias = &scratch.bias;
            SoftmaxRow { scores, bias }.with_simd(simd);
        }
        for (index, (page, visible)) in spans.enumerate() {
            let values = &self.values[place(page)..][..piece];
            let values = &values[visible.start * head_dim..visible.end * head_dim];
            let values = T::widened(values, &mut scratch.page[..values.len()]);
            for (weights, result) in scratch
                .weights
                .chunks_exact(width)
                .zip(scratch.result.chunks_exact_mut(head_dim))
            {
                let weights = &weights[index * PAGE..][visible.clone()];
                mix(simd, weights, values, result);
            }
        }
        T::write(&scratch.result, self.y);
    }
}

/// Computes the products of a query with the keys of a page, `[head_dim, PAGE]`.
#[inline(always)]
fn products<S: Simd>(simd: S, query: &[f32], keys: &[f32], scores: &mut [f32]) {
    let (keys, _) = S::as_simd_f32s(keys);
    let (scores, _) = S::as_mut_simd_f32s(scores);
    let vectors = scores.len();
    for (j, score) in scores.iter_mut().enumerate() {
        let mut sums = [simd.splat_f32s(0.0); SUMS];
        let mut queries = query.chunks_exact(SUMS);
        let mut keys = keys[j..].chunks(SUMS * vectors);
        for (query, keys) in (&mut queries).zip(&mut keys) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul_add_e_f32s(simd.splat_f32s(query[i]), keys[i * vectors], *sum);
            }
        }
        let rest = keys.next().unwrap_or(&[]).iter().step_by(vectors);
        for (sum, (&query, &key)) in sums.iter_mut().zip(queries.remainder().iter().zip(rest)) {
            *sum = simd.mul_add_e_f32s(simd.splat_f32s(query), key, *sum);
        }
        let [a, b, c, d] = sums;
        *score = simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d));
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
    for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
        for (sum, &value) in rest.iter_mut().zip(&values[whole..]) {
            *sum += weight * value;
        }
    }
}
