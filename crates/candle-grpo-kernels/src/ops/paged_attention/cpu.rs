//! The CPU path of [`paged_attention`](crate::paged_attention()).
//!
//! A task computes one key head for some rows, with the query heads that share it: the scores at
//! all visible positions, their softmax, and the weighted value sum. Pages are read in place, and
//! pages that the rows share are read only once.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{KeyValuePages, PAGE, PageSlot, PageSpan, PagedRow, groups};
use crate::Scores;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{L2, MAX_LANES, prefetch};
use crate::cpu::{output, slice};
use crate::ops::attention::cpu::SoftmaxRow;
use crate::ops::soft_cap::cpu::CapRow;

/// Minimum number of products to use more than one core.
const WORTH_SHARING: usize = 1 << 18;

/// Maximum rows per task.
const ROWS: usize = 8;

/// Minimum tasks per core, so that all cores finish at about the same time.
const TASKS_PER_CORE: usize = 2;

/// Number of pages to prefetch.
const AHEAD: usize = 2;

/// Maximum number of queries to multiply with a page together. This hides the latency of additions.
const QUERIES: usize = 8;

/// Number of result vectors to sum together, for the same reason.
const SUMS: usize = 4;

/// Returns the attended values, with the length of a contiguous `query`.
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
                let seen: usize = rows.iter().map(|row| row.visible).sum();
                let share = seen * piece * kv_heads >= WORTH_SHARING;
                let tasks = if share {
                    TASKS_PER_CORE * rayon::current_num_threads()
                } else {
                    1
                };
                let most = (rows.len() * kv_heads / tasks).clamp(1, ROWS);
                let fill = |y: &mut [MaybeUninit<T>]| {
                    let mut tasks = Vec::with_capacity(rows.len() * kv_heads);
                    let mut rest = y;
                    for (range, shared) in groups(rows, most) {
                        let (y, after) =
                            std::mem::take(&mut rest).split_at_mut(range.len() * kv_heads * piece);
                        rest = after;
                        let mut targets: Vec<Vec<_>> = (0..kv_heads).map(|_| Vec::new()).collect();
                        for (index, target) in y.chunks_exact_mut(piece).enumerate() {
                            targets[index % kv_heads].push(target);
                        }
                        let first = range.start * kv_heads;
                        tasks.extend(targets.into_iter().enumerate().map(|(head, targets)| Task {
                            query: &query[(first + head) * piece..],
                            stride: kv_heads * piece,
                            keys,
                            values,
                            rows: &rows[range.clone()],
                            shared: &rows[range.start].spans[..shared],
                            head,
                            kv_heads,
                            heads: piece / head_dim,
                            head_dim,
                            scores,
                            targets,
                        }));
                    }
                    let run = |scratch: &mut Scratch, task: Task<T>| {
                        vectors().dispatch(RunTask { task, scratch })
                    };
                    if share {
                        tasks.into_par_iter().for_each_init(Scratch::default, run)
                    } else {
                        let scratch = &mut Scratch::default();
                        tasks.into_iter().for_each(|task| run(scratch, task));
                    }
                };
                // SAFETY: the tasks partition the result, and each writes its whole part.
                #[allow(unsafe_code)]
                Ok(unsafe { output::filled(query.len(), fill) })
            })
        })
    })
}

/// Writes `rows` `[N, kv_heads * head_dim]` to slots in `pages`. A head in a page has layout
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

/// A task's buffers.
#[derive(Default)]
struct Scratch {
    /// Zeros.
    bias: Vec<f32>,
    windows: Vec<Window>,
    /// Each query's scores, then their softmax, by position.
    weights: Vec<f32>,
    /// Each row's queries.
    query: Vec<f32>,
    /// Their results.
    result: Vec<f32>,
    /// One head's page in f32, unless the pages are f32.
    page: Vec<f32>,
}

/// A row's visible positions, and where its weights are stored.
struct Window {
    visible: Range<usize>,
    /// Position of the first weight. Sums start at a whole vector, as in training.
    begin: usize,
    /// Weights per query.
    width: usize,
    /// Where the first query's first weight is stored.
    place: usize,
}

impl Window {
    fn weights(&self, query: usize) -> Range<usize> {
        let start = self.place + query * self.width;
        start..start + self.width
    }

    /// Returns the visible positions in a part, and where their weights for the first query are
    /// stored.
    #[inline(always)]
    fn visible_in(&self, part: &Part) -> Option<(Range<usize>, usize)> {
        let len = part.span.len;
        let len = len.min(self.visible.end.saturating_sub(part.start));
        let hidden = self.visible.start.saturating_sub(part.start);
        (hidden < len).then(|| (hidden..len, self.place + part.start + hidden - self.begin))
    }
}

/// A span shared by some rows.
struct Part {
    rows: Range<usize>,
    /// The position where it starts.
    start: usize,
    span: PageSpan,
}

/// One key head for some rows.
struct Task<'a, T> {
    /// Query heads for the first row. The next row starts `stride` later.
    query: &'a [T],
    stride: usize,
    keys: &'a [T],
    values: &'a [T],
    rows: &'a [PagedRow<'a>],
    /// The first spans in each row, which are the same.
    shared: &'a [PageSpan],
    head: usize,
    kv_heads: usize,
    /// Query heads per row.
    heads: usize,
    head_dim: usize,
    scores: &'a Scores,
    /// Each row's result.
    targets: Vec<&'a mut [MaybeUninit<T>]>,
}

struct RunTask<'a, 's, T> {
    task: Task<'a, T>,
    scratch: &'s mut Scratch,
}

impl<T: Element> WithSimd for RunTask<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { task, scratch } = self;
        task.begin(scratch);
        // Plain loops, because the compiler must inline everything and does not inline every
        // closure.
        let parts = task.parts(&scratch.windows);
        // The processor does not load a page before the first access to it.
        let keys = parts.iter().map(|part| task.page(task.keys, part));
        let values = parts.iter().map(|part| task.page(task.values, part));
        let mut ahead = keys.chain(values).skip(AHEAD);
        for part in &parts {
            if let Some(page) = ahead.next() {
                prefetch::<L2, _>(page.as_ptr(), page.len());
            }
            task.score(simd, part, scratch);
        }
        for window in &scratch.windows {
            let all = window.place..window.weights(task.heads).start;
            for scores in scratch.weights[all].chunks_exact_mut(window.width) {
                let bias = &scratch.bias[..window.width];
                SoftmaxRow { scores, bias }.with_simd(simd);
            }
        }
        for part in &parts {
            if let Some(page) = ahead.next() {
                prefetch::<L2, _>(page.as_ptr(), page.len());
            }
            task.mix(simd, part, scratch);
        }
        let results = scratch.result.chunks_exact(task.heads * task.head_dim);
        for (target, result) in task.targets.into_iter().zip(results) {
            T::write(result, target);
        }
    }
}

impl<T: Element> Task<'_, T> {
    /// Prepares the buffers.
    #[inline(always)]
    fn begin(&self, scratch: &mut Scratch) {
        let piece = self.heads * self.head_dim;
        scratch.query.resize(self.rows.len() * piece, 0.0);
        for (row, query) in scratch.query.chunks_exact_mut(piece).enumerate() {
            T::widen(&self.query[row * self.stride..][..piece], query);
            for x in query {
                *x *= self.scores.scale as f32;
            }
        }
        scratch.result.resize(scratch.query.len(), 0.0);
        scratch.result.fill(0.0);
        scratch.page.resize(self.head_dim * PAGE, 0.0);
        scratch.windows.clear();
        let mut place = 0;
        for row in self.rows {
            let first = self.scores.first_visible(row.visible);
            let begin = first / MAX_LANES * MAX_LANES;
            let window = Window {
                visible: first..row.visible,
                begin,
                width: (row.visible - begin).next_multiple_of(MAX_LANES),
                place,
            };
            place = window.weights(self.heads).start;
            if scratch.bias.len() < window.width {
                scratch.bias.resize(window.width, 0.0);
            }
            scratch.windows.push(window);
        }
        if scratch.weights.len() < place {
            scratch.weights.resize(place, 0.0);
        }
        // Masks positions before and after the visible ones.
        for window in &scratch.windows {
            for query in 0..self.heads {
                let weights = &mut scratch.weights[window.weights(query)];
                weights[..window.visible.start - window.begin].fill(f32::NEG_INFINITY);
                weights[window.visible.end - window.begin..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Returns the spans with visible positions, in order: first those that the rows share, then
    /// each row's own.
    fn parts(&self, windows: &[Window]) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut push = |part: Part| {
            let mut windows = windows[part.rows.clone()].iter();
            if windows.any(|window| window.visible_in(&part).is_some()) {
                parts.push(part);
            }
        };
        let mut start = 0;
        let all = 0..self.rows.len();
        for &span in self.shared {
            let rows = all.clone();
            push(Part { rows, start, span });
            start += span.len;
        }
        for row in all {
            let mut start = start;
            for &span in &self.rows[row].spans[self.shared.len()..] {
                let rows = row..row + 1;
                push(Part { rows, start, span });
                start += span.len;
            }
        }
        parts
    }

    /// The head's values in a page.
    fn page<'a>(&self, all: &'a [T], part: &Part) -> &'a [T] {
        let len = self.head_dim * PAGE;
        &all[(part.span.page * self.kv_heads + self.head) * len..][..len]
    }

    /// Queries for the rows in a part.
    #[inline(always)]
    fn queries(&self, part: &Part) -> Range<usize> {
        part.rows.start * self.heads..part.rows.end * self.heads
    }

    /// Returns the positions in a part that a query sees, and where their weights are stored.
    #[inline(always)]
    fn seen(
        &self,
        query: usize,
        part: &Part,
        windows: &[Window],
    ) -> Option<(Range<usize>, Range<usize>)> {
        let window = &windows[query / self.heads];
        let (visible, at) = window.visible_in(part)?;
        let at = at + query % self.heads * window.width;
        let place = at..at + visible.len();
        Some((visible, place))
    }

    /// Writes the scores at a part's positions, for the queries in its rows.
    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, part: &Part, scratch: &mut Scratch) {
        let keys = T::widened(self.page(self.keys, part), &mut scratch.page);
        let dim = self.head_dim;
        let mut left = self.queries(part);
        while !left.is_empty() {
            let mut scores = [[0.0; PAGE]; QUERIES];
            let queries = &scratch.query[left.start * dim..];
            let count = match left.len() {
                QUERIES.. => products::<S, QUERIES>(simd, queries, dim, keys, &mut scores),
                4.. => products::<S, 4>(simd, queries, dim, keys, &mut scores),
                3 => products::<S, 3>(simd, queries, dim, keys, &mut scores),
                2 => products::<S, 2>(simd, queries, dim, keys, &mut scores),
                _ => products::<S, 1>(simd, queries, dim, keys, &mut scores),
            };
            for (scores, query) in scores.iter_mut().zip(left.by_ref().take(count)) {
                let Some((visible, place)) = self.seen(query, part, &scratch.windows) else {
                    continue;
                };
                if let Some(cap) = self.scores.cap {
                    let cap = cap as f32;
                    CapRow { scores, cap }.with_simd(simd);
                }
                scratch.weights[place].copy_from_slice(&scores[visible]);
            }
        }
    }

    /// Adds the weighted values at a part's positions to its rows' results.
    #[inline(always)]
    fn mix<S: Simd>(&self, simd: S, part: &Part, scratch: &mut Scratch) {
        let values = T::widened(self.page(self.values, part), &mut scratch.page);
        let dim = self.head_dim;
        let queries = self.queries(part);
        let results = &mut scratch.result[queries.start * dim..queries.end * dim];
        // Two queries at a time, which read the values once.
        for (query, results) in queries.clone().step_by(2).zip(results.chunks_mut(2 * dim)) {
            let pair = [query, query + 1].map(|query| {
                let is_there = queries.contains(&query);
                let (visible, place) =
                    is_there.then(|| self.seen(query, part, &scratch.windows))??;
                Some((&scratch.weights[place], visible))
            });
            let (first, second) = results.split_at_mut(dim);
            let of = |visible: &Range<usize>| &values[visible.start * dim..visible.end * dim];
            match pair {
                [Some((a, visible)), Some((b, other))] if visible == other => {
                    mix(simd, [a, b], of(&visible), [first, second]);
                }
                [a, b] => {
                    if let Some((weights, visible)) = a {
                        mix(simd, [weights], of(&visible), [first]);
                    }
                    if let Some((weights, visible)) = b {
                        mix(simd, [weights], of(&visible), [second]);
                    }
                }
            }
        }
    }
}

/// Computes the products of H queries with a page's keys, `[head_dim, PAGE]`, and returns H. Each
/// is a chain of multiply-adds, as in training's matrix products.
#[inline(always)]
fn products<S: Simd, const H: usize>(
    simd: S,
    queries: &[f32],
    head_dim: usize,
    keys: &[f32],
    scores: &mut [[f32; PAGE]; QUERIES],
) -> usize {
    let (keys, _) = S::as_simd_f32s(keys);
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
    H
}

/// Adds the weighted values `[len, head_dim]` to Q results.
#[inline(always)]
fn mix<S: Simd, const Q: usize>(
    simd: S,
    weights: [&[f32]; Q],
    values: &[f32],
    results: [&mut [f32]; Q],
) {
    let head_dim = results[0].len();
    let len = values.len() / head_dim;
    let weights = weights.map(|weights| &weights[..len]);
    let mut parts = results.map(|result| S::as_mut_simd_f32s(result));
    let vectors = parts[0].0.len();
    let whole = vectors * S::F32_LANES;
    let mut first = 0;
    while first + SUMS <= vectors {
        let mut sums = [[simd.splat_f32s(0.0); SUMS]; Q];
        for (sums, part) in sums.iter_mut().zip(&parts) {
            sums.copy_from_slice(&part.0[first..][..SUMS]);
        }
        for (k, values) in values.chunks_exact(head_dim).enumerate() {
            let values = &values[first * S::F32_LANES..][..SUMS * S::F32_LANES];
            let (values, _) = S::as_simd_f32s(values);
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let weight = simd.splat_f32s(weights[k]);
                for (sum, &value) in sums.iter_mut().zip(values) {
                    *sum = simd.mul_add_e_f32s(weight, value, *sum);
                }
            }
        }
        for (part, sums) in parts.iter_mut().zip(sums) {
            part.0[first..][..SUMS].copy_from_slice(&sums);
        }
        first += SUMS;
    }
    // The vectors that are left.
    for (part, weights) in parts.iter_mut().zip(weights) {
        for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
            let weight = simd.splat_f32s(weight);
            let (values, _) = S::as_simd_f32s(&values[first * S::F32_LANES..]);
            for (sum, &value) in part.0[first..].iter_mut().zip(values) {
                *sum = simd.mul_add_e_f32s(weight, value, *sum);
            }
        }
    }
    for (part, weights) in parts.iter_mut().zip(weights) {
        let rest = &mut *part.1;
        if rest.is_empty() {
            continue;
        }
        let mut sum = simd.partial_load_f32s(rest);
        for (&weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
            let values = simd.partial_load_f32s(&values[whole..]);
            sum = simd.mul_add_e_f32s(simd.splat_f32s(weight), values, sum);
        }
        simd.partial_store_f32s(rest, sum);
    }
}
