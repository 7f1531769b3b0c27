//! The CPU path of [`gated_delta_rule`](crate::gated_delta_rule()).
//!
//! A task computes one key head of one tree of sequences and the value heads that share it. It
//! processes chunks of rows in order. In a chunk with the running sum `c` of the gates,
//! `G_ij = exp(c_i - c_j)` and the state S before it:
//!
//! ```text
//! M = tril(beta K K^T * G, -1)       P = tril(Q K^T * G)
//! R = V - exp(c) K S                 N = (I + M)^-1 beta R
//! O = exp(c) Q S + P N               S' = exp(c_last) S + (exp(c_last - c) K)^T N
//! ```
//!
//! The backward pass first computes S, R and N of all chunks of the tree, then processes the chunks
//! in reverse. With the gradients dO of the result and dS' of the state after a chunk:
//!
//! ```text
//! X = (I + M)^-T (P^T dO + exp(c_last - c) K dS')
//! dM = -tril(X N^T, -1)              dP = tril(dO N^T)
//! Z = [-exp(c) beta X; exp(c) dO]    d[K; Q] = Z S^T + [..] (from dM, dP and N dS'^T)
//! dV = beta X                        dS = exp(c_last) dS' + [K; Q]^T Z
//! ```

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{GatedDeltaRule, NORM_EPSILON};
use crate::DeltaHeads;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::matmul::matmul_on_one_core;
use crate::cpu::matrix::Matrix;
use crate::cpu::simd::{add_scaled, dot, exp_differences, map_pairs, scale, sum};
use crate::cpu::{output, slice};
use crate::prefix_tree::{PrefixTree, Segment};

/// Rows of a chunk.
const CHUNK: usize = 64;

/// The contiguous inputs of [`gated_delta_rule`](crate::gated_delta_rule()).
pub(crate) struct Inputs<'a, T> {
    pub(crate) qkv: &'a [T],
    pub(crate) g: &'a [f32],
    pub(crate) beta: &'a [f32],
}

/// Returns the result `[N, value_heads * value_dim]`.
pub(crate) fn forward<T: Element>(inputs: &Inputs<T>, op: &GatedDeltaRule) -> Vec<T> {
    let heads = &op.heads;
    let fill = |o: &mut [MaybeUninit<T>]| {
        by_task(o, op, &[heads.group() * heads.value_dim])
            .into_par_iter()
            .enumerate()
            .for_each_init(
                || Scratch::new(heads),
                |scratch, (index, o)| {
                    let task = Task::new(index, inputs, op);
                    vectors().dispatch(Forward { task, scratch, o });
                },
            );
    };
    // SAFETY: the tasks partition the result, and each writes its whole part.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(op.tree.rows() * heads.values(), fill)
    }
}

/// Returns the gradients of `qkv`, `g` and `beta`, in their shapes.
pub(crate) fn backward<T: Element>(
    inputs: [&Tensor; 3],
    gradient: &Tensor,
    op: &GatedDeltaRule,
) -> Result<[Tensor; 3]> {
    let [of_qkv, of_g, of_beta] = inputs;
    let (qkv_gradient, (g_gradient, beta_gradient)) = slice::read::<T, _>(of_qkv, |qkv| {
        slice::read::<f32, _>(of_g, |g| {
            slice::read::<f32, _>(of_beta, |beta| {
                slice::read::<T, _>(gradient, |gradient| {
                    let inputs = Inputs { qkv, g, beta };
                    Ok(backward_of_slices(&inputs, gradient, op))
                })
            })
        })
    })?;
    Ok([
        Tensor::from_vec(qkv_gradient, of_qkv.shape(), &Device::Cpu)?,
        Tensor::from_vec(g_gradient, of_g.shape(), &Device::Cpu)?,
        Tensor::from_vec(beta_gradient, of_beta.shape(), &Device::Cpu)?,
    ])
}

fn backward_of_slices<T: Element>(
    inputs: &Inputs<T>,
    gradient: &[T],
    op: &GatedDeltaRule,
) -> (Vec<T>, (Vec<f32>, Vec<f32>)) {
    let heads = &op.heads;
    let values = heads.group() * heads.value_dim;
    let mut gate_gradients = (Vec::new(), Vec::new());
    let fill = |qkv: &mut [MaybeUninit<T>]| {
        let fill = |g: &mut [MaybeUninit<f32>], beta: &mut [MaybeUninit<f32>]| {
            let qkv = by_task(qkv, op, &[heads.key_dim, heads.key_dim, values]);
            let g = by_task(g, op, &[heads.group()]);
            let beta = by_task(beta, op, &[heads.group()]);
            let outputs = qkv.into_par_iter().zip(g.into_par_iter().zip(beta));
            outputs.enumerate().for_each_init(
                || (Scratch::new(heads), BackwardScratch::new(heads)),
                |(scratch, more), (index, (qkv, (g, beta)))| {
                    let task = Task::new(index, inputs, op);
                    let of = Gradients { qkv, g, beta };
                    vectors().dispatch(Backward {
                        task,
                        scratch,
                        more,
                        gradient,
                        of,
                    });
                },
            );
        };
        // SAFETY: the tasks partition both results, and each writes its whole parts.
        #[allow(unsafe_code)]
        unsafe {
            gate_gradients = output::two_filled(inputs.g.len(), fill);
        }
    };
    // SAFETY: the tasks partition the result, and each writes its whole part.
    #[allow(unsafe_code)]
    let qkv_gradient = unsafe { output::filled(inputs.qkv.len(), fill) };
    (qkv_gradient, gate_gradients)
}

/// Returns the part of each task, in the order of the rows of its tree. A row consists of sections,
/// each with a piece of this width for each key head.
pub(crate) fn by_task<'a, X>(
    mut rows: &'a mut [X],
    op: &GatedDeltaRule,
    sections: &[usize],
) -> Vec<Vec<&'a mut [X]>> {
    let key_heads = op.heads.key_heads;
    let of_tree = op.tree.trees().iter().map(|segments| {
        let rows = segments.iter().map(|&at| op.tree.segments()[at].rows.len());
        rows.sum::<usize>() * sections.len()
    });
    let mut parts: Vec<Vec<_>> = of_tree
        .flat_map(|pieces| (0..key_heads).map(move |_| Vec::with_capacity(pieces)))
        .collect();
    for tree in op.tree.tree_of_rows() {
        for &width in sections {
            for part in &mut parts[tree * key_heads..][..key_heads] {
                let (piece, rest) = std::mem::take(&mut rows).split_at_mut(width);
                part.push(piece);
                rows = rest;
            }
        }
    }
    parts
}

/// One key head of one tree.
pub(crate) struct Task<'a, T> {
    inputs: &'a Inputs<'a, T>,
    pub(crate) heads: DeltaHeads,
    tree: &'a PrefixTree,
    /// Indices of the segments of the tree.
    segments: &'a [usize],
    key_head: usize,
}

/// Rows of a segment.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    /// The first row.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// Index of the first row among the rows of the tree.
    pub(crate) place: usize,
}

impl Chunk {
    fn all(segment: &Segment) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator {
        let (rows, place) = (segment.rows.clone(), segment.place);
        (0..rows.len().div_ceil(CHUNK)).map(move |index| {
            let first = rows.start + index * CHUNK;
            Self {
                first,
                rows: CHUNK.min(rows.end - first),
                place: place + index * CHUNK,
            }
        })
    }
}

/// Buffers of a task in both passes.
struct Scratch {
    /// The keys of a chunk, then its queries: `[2 * rows, key_dim]`, normalized.
    keys: Vec<f32>,
    /// The factors of the normalization.
    norms: Vec<f32>,
    /// `keys` times the transposed keys, `[2 * rows, rows]`.
    products: Vec<f32>,
    /// The states of all value heads.
    states: Vec<f32>,
    /// The states after each segment of the tree that has branches.
    ends: Vec<Vec<f32>>,
    head: HeadScratch,
}

/// Buffers for a value head of a chunk.
struct HeadScratch {
    /// The running sum of the gates.
    sums: Vec<f32>,
    beta: Vec<f32>,
    /// `[rows, rows]`: `exp(c_i - c_j)` at and below the diagonal, as `mixing`.
    decays: Vec<f32>,
    /// M, only below the diagonal.
    system: Vec<f32>,
    /// P, with zeros above the diagonal.
    mixing: Vec<f32>,
    /// `[2 * rows, value_dim]`: the states that keys and queries read, then R and the result.
    read: Vec<f32>,
    /// N, `[rows, value_dim]`
    changes: Vec<f32>,
    /// `[rows, value_dim]`: values, then N with its decay to the end of the chunk.
    values: Vec<f32>,
}

/// Further buffers of a task in the backward pass.
struct BackwardScratch {
    /// For each chunk of the tree and each value head: S, R and N.
    records: Vec<f32>,
    /// The gradients of the states of all value heads.
    state_gradients: Vec<f32>,
    /// The gradients of the states after each segment of the tree that has branches.
    ends: Vec<Vec<f32>>,
    chunk: ChunkGradients,
}

/// The gradients of a chunk, and buffers for those of a value head.
struct ChunkGradients {
    /// `[2 * rows, key_dim]`
    key_gradients: Vec<f32>,
    /// `[2 * rows, key_dim]`
    key_terms: Vec<f32>,
    /// `[2 * rows, rows]`, zeros above the diagonals.
    product_gradients: Vec<f32>,
    /// `[2 * rows, rows]`: `X N^T`, then `dO N^T`.
    pairs: Vec<f32>,
    /// `[2 * rows, value_dim]`: X and dO, then Z.
    value_terms: Vec<f32>,
    /// The gradient of the running sum of the gates.
    sum_gradients: Vec<f32>,
    /// `[rows, group]`
    g_gradients: Vec<f32>,
    beta_gradients: Vec<f32>,
    /// `[rows, group * value_dim]`
    value_gradients: Vec<f32>,
}

/// A value head of a chunk in the backward pass, with its record.
#[derive(Clone, Copy)]
struct RecordedHead<'a> {
    /// Index in the group.
    index: usize,
    /// S
    state: &'a [f32],
    /// R
    errors: &'a [f32],
    /// N
    changes: &'a [f32],
    /// The field of [`Scratch`], like `products`.
    keys: &'a [f32],
    products: &'a [f32],
    /// With the gates of this head.
    buffers: &'a HeadScratch,
}

impl RecordedHead<'_> {
    /// Returns the sum of the gates of all rows of the chunk.
    fn last(&self, rows: usize) -> f32 {
        self.buffers.sums[rows - 1]
    }
}

impl Scratch {
    fn new(heads: &DeltaHeads) -> Self {
        let (key_dim, value_dim) = (heads.key_dim, heads.value_dim);
        Self {
            keys: vec![0.0; 2 * CHUNK * key_dim],
            norms: vec![0.0; 2 * CHUNK],
            products: vec![0.0; 2 * CHUNK * CHUNK],
            states: vec![0.0; heads.group() * key_dim * value_dim],
            ends: Vec::new(),
            head: HeadScratch {
                sums: vec![0.0; CHUNK],
                beta: vec![0.0; CHUNK],
                decays: vec![0.0; CHUNK * CHUNK],
                system: vec![0.0; CHUNK * CHUNK],
                mixing: vec![0.0; CHUNK * CHUNK],
                read: vec![0.0; 2 * CHUNK * value_dim],
                changes: vec![0.0; CHUNK * value_dim],
                values: vec![0.0; CHUNK * value_dim],
            },
        }
    }

    /// Keeps the states after a segment of the tree for its branches.
    fn keep_end(&mut self, segment: &Segment) {
        let end = if segment.has_branches {
            self.states.clone()
        } else {
            Vec::new()
        };
        self.ends.push(end);
    }
}

impl BackwardScratch {
    fn new(heads: &DeltaHeads) -> Self {
        let (key_dim, value_dim) = (heads.key_dim, heads.value_dim);
        Self {
            records: Vec::new(),
            state_gradients: vec![0.0; heads.group() * key_dim * value_dim],
            ends: Vec::new(),
            chunk: ChunkGradients {
                key_gradients: vec![0.0; 2 * CHUNK * key_dim],
                key_terms: vec![0.0; 2 * CHUNK * key_dim],
                product_gradients: vec![0.0; 2 * CHUNK * CHUNK],
                pairs: vec![0.0; 2 * CHUNK * CHUNK],
                value_terms: vec![0.0; 2 * CHUNK * value_dim],
                sum_gradients: vec![0.0; CHUNK],
                g_gradients: vec![0.0; CHUNK * heads.group()],
                beta_gradients: vec![0.0; CHUNK * heads.group()],
                value_gradients: vec![0.0; CHUNK * heads.group() * value_dim],
            },
        }
    }
}

impl<'a, T: Element> Task<'a, T> {
    pub(crate) fn new(index: usize, inputs: &'a Inputs<T>, op: &'a GatedDeltaRule) -> Self {
        Self {
            inputs,
            heads: op.heads,
            tree: &op.tree,
            segments: &op.tree.trees()[index / op.heads.key_heads],
            key_head: index % op.heads.key_heads,
        }
    }

    /// Elements of the state of a value head.
    pub(crate) fn state_len(&self) -> usize {
        self.heads.key_dim * self.heads.value_dim
    }

    /// Returns the first row of the tree.
    pub(crate) fn first_row(&self) -> usize {
        self.tree.segments()[self.segments[0]].rows.start
    }

    /// Elements of the record of a value head of a chunk: S, R and N.
    fn record_len(&self) -> usize {
        self.state_len() + 2 * CHUNK * self.heads.value_dim
    }

    /// Position of a segment of the tree in `segments`.
    fn index_of(&self, segment: usize) -> usize {
        self.segments.partition_point(|&other| other < segment)
    }

    /// Sets the states to those after the parent of a segment.
    fn start(&self, segment: &Segment, states: &mut [f32], ends: &[Vec<f32>]) {
        match segment.parent {
            Some(parent) => states.copy_from_slice(&ends[self.index_of(parent)]),
            None => states.fill(0.0),
        }
    }

    /// Loads and normalizes the keys of a chunk, then its queries, `[2 * rows, key_dim]`. Returns
    /// the factors in `norms`.
    #[inline(always)]
    pub(crate) fn normalize<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        keys: &mut [f32],
        norms: &mut [f32],
    ) {
        let (dim, rows) = (self.heads.key_dim, chunk.rows);
        let query = self.key_head * dim;
        let key = self.heads.keys() + query;
        for (half, first) in [key, query].into_iter().enumerate() {
            let factor = if half == 0 {
                1.0
            } else {
                (dim as f32).sqrt().recip()
            };
            for row in 0..rows {
                let source = (chunk.first + row) * self.heads.width() + first;
                let target = &mut keys[(half * rows + row) * dim..][..dim];
                T::widen(&self.inputs.qkv[source..][..dim], target);
                let squares = dot(simd, target, target);
                let norm = factor / (squares + NORM_EPSILON as f32).sqrt();
                scale(simd, norm, target);
                norms[half * rows + row] = norm;
            }
        }
    }

    /// Loads and normalizes the keys and queries of a chunk, and multiplies them.
    #[inline(always)]
    fn load_keys<S: Simd>(&self, simd: S, chunk: Chunk, scratch: &mut Scratch) {
        let (dim, rows) = (self.heads.key_dim, chunk.rows);
        self.normalize(simd, chunk, &mut scratch.keys, &mut scratch.norms);
        matmul_on_one_core(
            &mut scratch.products,
            rows,
            false,
            Matrix::new(&scratch.keys, 2 * rows, dim, dim),
            Matrix::new(&scratch.keys, rows, dim, dim).t(),
        );
    }

    /// Returns `g` and `beta` of value head `head` of the group.
    pub(crate) fn gates(&self, row: usize, head: usize) -> (f32, f32) {
        let at = row * self.heads.value_heads + self.key_head * self.heads.group() + head;
        (self.inputs.g[at], self.inputs.beta[at])
    }

    /// Loads the gates of value head `head` of the group, and computes the decays and M and P.
    #[inline(always)]
    fn load_gates<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        head: usize,
        products: &[f32],
        scratch: &mut HeadScratch,
    ) {
        let rows = chunk.rows;
        let mut sum = 0.0;
        for row in 0..rows {
            let (g, beta) = self.gates(chunk.first + row, head);
            sum += g;
            scratch.sums[row] = sum;
            scratch.beta[row] = beta;
        }
        for row in 0..rows {
            let at = row * rows;
            let beta = simd.splat_f32s(scratch.beta[row]);
            let decays = &mut scratch.decays[at..][..rows];
            let (seen, hidden) = decays.split_at_mut(row + 1);
            exp_differences(simd, seen, scratch.sums[row], &scratch.sums[..=row]);
            hidden.fill(0.0);
            let system = &mut scratch.system[at..][..=row];
            system.copy_from_slice(&decays[..=row]);
            map_pairs(simd, system, &products[at..][..=row], |decay, product| {
                simd.mul_f32s(simd.mul_f32s(decay, beta), product)
            });
            let mixing = &mut scratch.mixing[at..][..rows];
            mixing.copy_from_slice(decays);
            let queries = &products[rows * rows + at..][..=row];
            map_pairs(simd, &mut mixing[..=row], queries, |decay, product| {
                simd.mul_f32s(decay, product)
            });
        }
    }

    /// Returns the value of value head `head` of the group.
    pub(crate) fn value(&self, row: usize, head: usize) -> &[T] {
        let head = self.key_head * self.heads.group() + head;
        let first = row * self.heads.width() + 2 * self.heads.keys();
        &self.inputs.qkv[first + head * self.heads.value_dim..][..self.heads.value_dim]
    }

    /// Computes R and N of value head `head` of the group, and advances its state. If queries
    /// follow the keys, also computes the result, after R.
    #[inline(always)]
    fn advance<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        head: usize,
        keys: &[f32],
        state: &mut [f32],
        scratch: &mut HeadScratch,
    ) {
        let (rows, key_dim, dim) = (chunk.rows, self.heads.key_dim, self.heads.value_dim);
        let reads = keys.len() / key_dim;
        for (row, values) in scratch.values.chunks_exact_mut(dim).take(rows).enumerate() {
            T::widen(self.value(chunk.first + row, head), values);
        }
        matmul_on_one_core(
            &mut scratch.read,
            dim,
            false,
            Matrix::new(keys, reads, key_dim, key_dim),
            Matrix::new(state, key_dim, dim, dim),
        );
        let (errors, results) = scratch.read.split_at_mut(rows * dim);
        for row in 0..rows {
            let at = row * dim;
            let decay = simd.splat_f32s(-scratch.sums[row].exp());
            let errors = &mut errors[at..][..dim];
            map_pairs(simd, errors, &scratch.values[at..][..dim], |read, value| {
                simd.mul_add_e_f32s(decay, read, value)
            });
            let (done, rest) = scratch.changes.split_at_mut(at);
            let change = &mut rest[..dim];
            change.copy_from_slice(errors);
            scale(simd, scratch.beta[row], change);
            let system = &scratch.system[row * rows..][..row];
            subtract_rows(simd, change, system.iter().copied(), done);
        }
        if reads > rows {
            for (row, result) in results.chunks_exact_mut(dim).take(rows).enumerate() {
                scale(simd, scratch.sums[row].exp(), result);
            }
            matmul_on_one_core(
                results,
                dim,
                true,
                Matrix::new(&scratch.mixing, rows, rows, rows),
                Matrix::new(&scratch.changes, rows, dim, dim),
            );
        }
        let last = scratch.sums[rows - 1];
        scale(simd, last.exp(), state);
        for row in 0..rows {
            let values = &mut scratch.values[row * dim..][..dim];
            values.copy_from_slice(&scratch.changes[row * dim..][..dim]);
            scale(simd, (last - scratch.sums[row]).exp(), values);
        }
        matmul_on_one_core(
            state,
            dim,
            true,
            Matrix::new(keys, rows, key_dim, key_dim).t(),
            Matrix::new(&scratch.values, rows, dim, dim),
        );
    }
}

/// Subtracts rows times coefficients from `x`. A block of `x` stays in registers.
#[inline(always)]
fn subtract_rows<S: Simd>(
    simd: S,
    x: &mut [f32],
    coefficients: impl Iterator<Item = f32> + Clone,
    rows: &[f32],
) {
    const VECTORS: usize = 4;
    let (width, block) = (x.len(), VECTORS * S::F32_LANES);
    let in_blocks = width - width % block;
    for first in (0..in_blocks).step_by(block) {
        let (sums, _) = S::as_mut_simd_f32s(&mut x[first..][..block]);
        let mut kept: [S::f32s; VECTORS] = std::array::from_fn(|at| sums[at]);
        for (coefficient, row) in coefficients.clone().zip(rows.chunks_exact(width)) {
            let factor = simd.splat_f32s(-coefficient);
            let (row, _) = S::as_simd_f32s(&row[first..][..block]);
            for (kept, &row) in kept.iter_mut().zip(row) {
                *kept = simd.mul_add_e_f32s(factor, row, *kept);
            }
        }
        sums.copy_from_slice(&kept);
    }
    for (coefficient, row) in coefficients.zip(rows.chunks_exact(width)) {
        add_scaled(simd, &mut x[in_blocks..], -coefficient, &row[in_blocks..]);
    }
}

struct Forward<'a, 'b, T> {
    task: Task<'a, T>,
    scratch: &'b mut Scratch,
    o: Vec<&'b mut [MaybeUninit<T>]>,
}

impl<T: Element> WithSimd for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            task,
            scratch,
            mut o,
        } = self;
        let (dim, state_len) = (task.heads.value_dim, task.state_len());
        scratch.ends.clear();
        for &index in task.segments {
            let segment = &task.tree.segments()[index];
            task.start(segment, &mut scratch.states, &scratch.ends);
            for chunk in Chunk::all(segment) {
                task.load_keys(simd, chunk, scratch);
                let Scratch {
                    keys,
                    products,
                    states,
                    head: buffers,
                    ..
                } = &mut *scratch;
                let keys = &keys[..2 * chunk.rows * task.heads.key_dim];
                for (head, state) in states.chunks_exact_mut(state_len).enumerate() {
                    task.load_gates(simd, chunk, head, products, buffers);
                    task.advance(simd, chunk, head, keys, state, buffers);
                    let results = buffers.read[chunk.rows * dim..].chunks_exact(dim);
                    for (o, result) in o[chunk.place..][..chunk.rows].iter_mut().zip(results) {
                        T::write(result, &mut o[head * dim..][..dim]);
                    }
                }
            }
            scratch.keep_end(segment);
        }
    }
}

/// The parts of the gradients of a task.
struct Gradients<'a, T> {
    /// Pieces of query, key and values for each row.
    qkv: Vec<&'a mut [MaybeUninit<T>]>,
    g: Vec<&'a mut [MaybeUninit<f32>]>,
    beta: Vec<&'a mut [MaybeUninit<f32>]>,
}

struct Backward<'a, 'b, T> {
    task: Task<'a, T>,
    scratch: &'b mut Scratch,
    more: &'b mut BackwardScratch,
    gradient: &'a [T],
    of: Gradients<'b, T>,
}

impl<T: Element> WithSimd for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            task,
            scratch,
            more,
            gradient,
            mut of,
        } = self;
        let chunks = task.record(simd, scratch, &mut more.records);
        let record_len = task.heads.group() * task.record_len();
        let mut next = chunks * record_len;
        let segments = task.segments.iter().map(|&at| &task.tree.segments()[at]);
        let states = more.state_gradients.len();
        let len = |segment: &Segment| if segment.has_branches { states } else { 0 };
        more.ends.clear();
        more.ends
            .extend(segments.clone().map(|segment| vec![0.0; len(segment)]));
        for (index, segment) in segments.enumerate().rev() {
            if segment.has_branches {
                more.state_gradients.copy_from_slice(&more.ends[index])
            } else {
                more.state_gradients.fill(0.0)
            }
            for chunk in Chunk::all(segment).rev() {
                next -= record_len;
                task.backward(simd, chunk, scratch, more, next, gradient);
                task.write_gradients(simd, chunk, scratch, &mut more.chunk, &mut of);
            }
            if let Some(parent) = segment.parent {
                let sum = &mut more.ends[task.index_of(parent)];
                add_scaled(simd, sum, 1.0, &more.state_gradients);
            }
        }
    }
}

impl<T: Element> Task<'_, T> {
    /// Fills the records of all chunks, and returns their number.
    #[inline(always)]
    fn record<S: Simd>(&self, simd: S, scratch: &mut Scratch, records: &mut Vec<f32>) -> usize {
        let segments = self.segments.iter().map(|&at| &self.tree.segments()[at]);
        let chunks = segments.clone().map(|x| Chunk::all(x).len()).sum::<usize>();
        let (state_len, record_len) = (self.state_len(), self.record_len());
        records.resize(chunks * self.heads.group() * record_len, 0.0);
        let mut records = records.chunks_exact_mut(record_len);
        scratch.ends.clear();
        for segment in segments {
            self.start(segment, &mut scratch.states, &scratch.ends);
            for chunk in Chunk::all(segment) {
                self.load_keys(simd, chunk, scratch);
                let Scratch {
                    keys,
                    products,
                    states,
                    head: buffers,
                    ..
                } = &mut *scratch;
                let keys = &keys[..chunk.rows * self.heads.key_dim];
                let len = chunk.rows * self.heads.value_dim;
                let states = states.chunks_exact_mut(state_len);
                for ((head, state), record) in states.enumerate().zip(&mut records) {
                    let (before, rest) = record.split_at_mut(state_len);
                    before.copy_from_slice(state);
                    self.load_gates(simd, chunk, head, products, buffers);
                    self.advance(simd, chunk, head, keys, state, buffers);
                    rest[..len].copy_from_slice(&buffers.read[..len]);
                    rest[len..][..len].copy_from_slice(&buffers.changes[..len]);
                }
            }
            scratch.keep_end(segment);
        }
        chunks
    }

    /// Computes the gradients of a chunk whose records start at `first_record`, and replaces the
    /// gradients of the states after it by those of the states before it.
    #[inline(always)]
    fn backward<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        scratch: &mut Scratch,
        more: &mut BackwardScratch,
        first_record: usize,
        gradient: &[T],
    ) {
        let (rows, key_dim) = (chunk.rows, self.heads.key_dim);
        let len = rows * self.heads.value_dim;
        self.load_keys(simd, chunk, scratch);
        let Scratch {
            keys,
            products,
            head: buffers,
            ..
        } = &mut *scratch;
        let BackwardScratch {
            records,
            state_gradients,
            chunk: of,
            ..
        } = more;
        of.key_gradients[..2 * rows * key_dim].fill(0.0);
        of.product_gradients[..2 * rows * rows].fill(0.0);
        let records = records[first_record..].chunks_exact(self.record_len());
        let state_gradients = state_gradients.chunks_exact_mut(self.state_len());
        for ((index, state_gradient), record) in state_gradients.enumerate().zip(records) {
            self.load_gates(simd, chunk, index, products, buffers);
            let (state, rest) = record.split_at(self.state_len());
            let head = RecordedHead {
                index,
                state,
                errors: &rest[..len],
                changes: &rest[len..][..len],
                keys,
                products,
                buffers,
            };
            of.sum_gradients[..rows].fill(0.0);
            self.backward_of_changes(simd, chunk, head, state_gradient, gradient, of);
            self.backward_of_pairs(simd, rows, head, of);
            self.backward_of_reads(simd, rows, head, of);
            self.backward_of_writes(simd, rows, head, state_gradient, of);
            let mut running = 0.0;
            for row in (0..rows).rev() {
                running += of.sum_gradients[row];
                of.g_gradients[row * self.heads.group() + head.index] = running;
            }
        }
        // Each product is of a key or query and a key.
        let products = Matrix::new(&of.product_gradients, 2 * rows, rows, rows);
        let all_keys = Matrix::new(keys, 2 * rows, key_dim, key_dim);
        let only_keys = Matrix::new(keys, rows, key_dim, key_dim);
        matmul_on_one_core(&mut of.key_gradients, key_dim, true, products, only_keys);
        matmul_on_one_core(&mut of.key_gradients, key_dim, true, products.t(), all_keys);
    }

    /// Computes X, and loads dO.
    #[inline(always)]
    fn backward_of_changes<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        head: RecordedHead,
        state_gradient: &[f32],
        gradient: &[T],
        of: &mut ChunkGradients,
    ) {
        let (rows, key_dim, dim) = (chunk.rows, self.heads.key_dim, self.heads.value_dim);
        let first = (self.key_head * self.heads.group() + head.index) * dim;
        for row in 0..rows {
            let source = (chunk.first + row) * self.heads.values() + first;
            let target = &mut of.value_terms[(rows + row) * dim..][..dim];
            T::widen(&gradient[source..][..dim], target);
        }
        let (x, result_gradient) = of.value_terms.split_at_mut(rows * dim);
        let state_gradient_matrix = Matrix::new(state_gradient, key_dim, dim, dim);
        let keys = Matrix::new(head.keys, rows, key_dim, key_dim);
        matmul_on_one_core(x, dim, false, keys, state_gradient_matrix);
        for row in 0..rows {
            let rest = (head.last(rows) - head.buffers.sums[row]).exp();
            scale(simd, rest, &mut x[row * dim..][..dim]);
        }
        matmul_on_one_core(
            x,
            dim,
            true,
            Matrix::new(&head.buffers.mixing, rows, rows, rows).t(),
            Matrix::new(result_gradient, rows, dim, dim),
        );
        for row in (0..rows).rev() {
            let (rest, done) = x.split_at_mut((row + 1) * dim);
            let below = (row + 1..rows).map(|other| head.buffers.system[other * rows + row]);
            subtract_rows(simd, &mut rest[row * dim..], below, done);
        }
    }

    /// Computes dM and dP, and adds their parts of the gradients of products and gates.
    #[inline(always)]
    fn backward_of_pairs<S: Simd>(
        &self,
        simd: S,
        rows: usize,
        head: RecordedHead,
        of: &mut ChunkGradients,
    ) {
        let (group, dim) = (self.heads.group(), self.heads.value_dim);
        matmul_on_one_core(
            &mut of.pairs,
            rows,
            false,
            Matrix::new(&of.value_terms, 2 * rows, dim, dim),
            Matrix::new(head.changes, rows, dim, dim).t(),
        );
        for row in 0..rows {
            let at = row * rows;
            let beta = head.buffers.beta[row];
            let decays = &head.buffers.decays[at..][..=row];
            // dM * G.
            let below = &mut of.pairs[at..][..row];
            map_pairs(simd, below, &decays[..row], |pair, decay| {
                simd.neg_f32s(simd.mul_f32s(pair, decay))
            });
            let of_products = &mut of.product_gradients[at..][..row];
            add_scaled(simd, of_products, beta, below);
            map_pairs(simd, below, &head.products[at..][..row], |pair, product| {
                simd.mul_f32s(pair, product)
            });
            let of_beta = sum(simd, below);
            of.beta_gradients[row * group + head.index] = of_beta
                + dot(
                    simd,
                    &of.value_terms[row * dim..][..dim],
                    &head.errors[row * dim..][..dim],
                );
            of.sum_gradients[row] += of_beta * beta;
            add_scaled(simd, &mut of.sum_gradients[..row], -beta, below);
            // dP * G.
            let at = rows * rows + at;
            let seen = &mut of.pairs[at..][..=row];
            map_pairs(simd, seen, decays, |pair, decay| simd.mul_f32s(pair, decay));
            add_scaled(simd, &mut of.product_gradients[at..][..=row], 1.0, seen);
            map_pairs(simd, seen, &head.products[at..][..=row], |pair, product| {
                simd.mul_f32s(pair, product)
            });
            of.sum_gradients[row] += sum(simd, seen);
            add_scaled(simd, &mut of.sum_gradients[..=row], -1.0, seen);
        }
    }

    /// Computes dV and Z, and adds the gradients of the keys and queries that read the state.
    #[inline(always)]
    fn backward_of_reads<S: Simd>(
        &self,
        simd: S,
        rows: usize,
        head: RecordedHead,
        of: &mut ChunkGradients,
    ) {
        let (group, key_dim, dim) = (self.heads.group(), self.heads.key_dim, self.heads.value_dim);
        for row in 0..rows {
            let decay = head.buffers.sums[row].exp();
            let x = &mut of.value_terms[row * dim..][..dim];
            scale(simd, head.buffers.beta[row], x);
            of.value_gradients[(row * group + head.index) * dim..][..dim].copy_from_slice(x);
            scale(simd, -decay, x);
            scale(
                simd,
                decay,
                &mut of.value_terms[(rows + row) * dim..][..dim],
            );
        }
        let terms = Matrix::new(&of.value_terms, 2 * rows, dim, dim);
        let state_matrix = Matrix::new(head.state, key_dim, dim, dim);
        matmul_on_one_core(&mut of.key_terms, key_dim, false, terms, state_matrix.t());
        for row in 0..2 * rows {
            let term = &of.key_terms[row * key_dim..][..key_dim];
            let own = &head.keys[row * key_dim..][..key_dim];
            add_scaled(
                simd,
                &mut of.key_gradients[row * key_dim..][..key_dim],
                1.0,
                term,
            );
            of.sum_gradients[row % rows] += dot(simd, own, term);
        }
    }

    /// Adds the gradients of the keys that write to the state after the chunk, and replaces dS' by
    /// dS.
    #[inline(always)]
    fn backward_of_writes<S: Simd>(
        &self,
        simd: S,
        rows: usize,
        head: RecordedHead,
        state_gradient: &mut [f32],
        of: &mut ChunkGradients,
    ) {
        let (key_dim, dim) = (self.heads.key_dim, self.heads.value_dim);
        matmul_on_one_core(
            &mut of.key_terms,
            key_dim,
            false,
            Matrix::new(head.changes, rows, dim, dim),
            Matrix::new(state_gradient, key_dim, dim, dim).t(),
        );
        let last = head.last(rows);
        let mut of_last = last.exp() * dot(simd, state_gradient, head.state);
        for row in 0..rows {
            let rest = (last - head.buffers.sums[row]).exp();
            let term = &of.key_terms[row * key_dim..][..key_dim];
            let own = &head.keys[row * key_dim..][..key_dim];
            add_scaled(
                simd,
                &mut of.key_gradients[row * key_dim..][..key_dim],
                rest,
                term,
            );
            let of_rest = rest * dot(simd, own, term);
            of.sum_gradients[row] -= of_rest;
            of_last += of_rest;
        }
        of.sum_gradients[rows - 1] += of_last;
        scale(simd, last.exp(), state_gradient);
        let keys = Matrix::new(head.keys, 2 * rows, key_dim, key_dim);
        let terms = Matrix::new(&of.value_terms, 2 * rows, dim, dim);
        matmul_on_one_core(state_gradient, dim, true, keys.t(), terms);
    }

    /// Writes the gradients of a chunk.
    #[inline(always)]
    fn write_gradients<S: Simd>(
        &self,
        simd: S,
        chunk: Chunk,
        scratch: &Scratch,
        gradients: &mut ChunkGradients,
        of: &mut Gradients<T>,
    ) {
        let (rows, group, dim) = (chunk.rows, self.heads.group(), self.heads.key_dim);
        let width = group * self.heads.value_dim;
        for row in 0..2 * rows {
            // The derivative of x / |x|, with the factor of the queries.
            let unit = &scratch.keys[row * dim..][..dim];
            let gradient = &mut gradients.key_gradients[row * dim..][..dim];
            let squared_factor = if row < rows { 1.0 } else { dim as f32 };
            let along = -squared_factor * dot(simd, unit, gradient);
            add_scaled(simd, gradient, along, unit);
            scale(simd, scratch.norms[row], gradient);
        }
        let (of_keys, of_queries) = gradients.key_gradients.split_at(rows * dim);
        for row in 0..rows {
            let place = chunk.place + row;
            let pieces = &mut of.qkv[3 * place..][..3];
            T::write(&of_queries[row * dim..][..dim], pieces[0]);
            T::write(&of_keys[row * dim..][..dim], pieces[1]);
            T::write(
                &gradients.value_gradients[row * width..][..width],
                pieces[2],
            );
            let gates = row * group..(row + 1) * group;
            f32::write(&gradients.g_gradients[gates.clone()], of.g[place]);
            f32::write(&gradients.beta_gradients[gates], of.beta[place]);
        }
    }
}
