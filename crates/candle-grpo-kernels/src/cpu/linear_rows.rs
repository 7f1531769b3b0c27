//! The CPU path of [`linear_rows`](crate::linear_rows()).
//!
//! Each result is a dot product with one vector of partial sums, so it is a function of two rows,
//! bit by bit. A tile of sums, of some rows and outputs, stays in registers. A task computes a few
//! outputs of all rows, so each weight is read from memory once.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Layout, Result, Storage, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::dequantize::widen;
use super::element::Element;
use super::{output, slice};
use crate::block_type;

/// Outputs of a task.
const TASK: usize = 32;

/// Rows of a tile, at most.
const ROWS: usize = 6;

/// Outputs of a tile. With 6 rows these are 24 sums, for the 32 vector registers of AVX-512.
const OUTPUTS: usize = 4;

/// Multiplies `x` `[N, inputs]` by each of the weights `[outputs, inputs]`, or blocks of them, all
/// contiguous. Returns the results `[N, outputs]` one after another.
pub(crate) fn forward<T: Element>(x: &Tensor, weights: &[Tensor]) -> Result<Vec<T>> {
    let (rows, inputs) = x.dims2()?;
    let held: Vec<_> = weights.iter().map(Tensor::storage_and_layout).collect();
    let weights = held
        .iter()
        .zip(weights)
        .map(|((storage, layout), weight)| Rows::new(storage, layout, weight))
        .collect::<Result<Vec<_>>>()?;
    let outputs: usize = weights.iter().map(|w| w.len(inputs)).sum();
    slice::read::<T, _>(x, |x| {
        let mut wide = vec![0.0; if T::as_f32(x).is_some() { 0 } else { x.len() }];
        let x = T::widened(x, &mut wide);
        let fill = |y: &mut [MaybeUninit<T>]| {
            tasks(y, rows, inputs, &weights)
                .into_par_iter()
                .for_each(|task| Arch::new().dispatch(Run { x, inputs, task }));
        };
        // SAFETY: the tasks partition the results, and each writes its whole part.
        #[allow(unsafe_code)]
        Ok(unsafe { output::filled(rows * outputs, fill) })
    })
}

/// Rows of a weight.
#[derive(Clone, Copy)]
enum Rows<'a, T> {
    Elements(&'a [T]),
    /// Blocks of quantized numbers, and their type.
    Blocks(&'a [u8], GgmlDType),
}

impl<'a, T: Element> Rows<'a, T> {
    fn new(storage: &'a Storage, layout: &Layout, weight: &Tensor) -> Result<Self> {
        Ok(match weight.dtype() {
            DType::U8 => Self::Blocks(slice::elements(storage, layout)?, block_type(weight)?),
            _ => Self::Elements(slice::elements(storage, layout)?),
        })
    }

    /// The number of rows.
    fn len(self, inputs: usize) -> usize {
        match self {
            Self::Elements(elements) => elements.len() / inputs,
            Self::Blocks(bytes, _) => bytes.len() / self.bytes(inputs),
        }
    }

    /// The bytes of a row.
    #[inline(always)]
    fn bytes(self, inputs: usize) -> usize {
        match self {
            Self::Elements(_) => inputs * size_of::<T>(),
            Self::Blocks(_, block_type) => {
                inputs / block_type.block_size() * block_type.type_size()
            }
        }
    }

    /// The rows in `range` that there are.
    #[inline(always)]
    fn slice(self, range: Range<usize>, inputs: usize) -> Self {
        let part = |row: usize, len: usize| range.start * row..(range.end * row).min(len);
        match self {
            Self::Elements(elements) => Self::Elements(&elements[part(inputs, elements.len())]),
            Self::Blocks(bytes, block_type) => {
                Self::Blocks(&bytes[part(self.bytes(inputs), bytes.len())], block_type)
            }
        }
    }

    #[inline(always)]
    fn is_f32(self) -> bool {
        matches!(self, Self::Elements(elements) if T::as_f32(elements).is_some())
    }

    /// Returns the rows in f32, rounded to the dtype of T. Uses `buffer` unless they are f32
    /// elements.
    #[inline(always)]
    fn widened(self, inputs: usize, buffer: &'a mut [f32]) -> &'a [f32] {
        match self {
            Self::Elements(elements) => {
                let len = buffer.len().min(elements.len());
                T::widened(elements, &mut buffer[..len])
            }
            Self::Blocks(bytes, block_type) => {
                let buffer = &mut buffer[..self.len(inputs) * inputs];
                widen(bytes, block_type, buffer);
                if T::as_f32(&[]).is_none() {
                    for number in &mut *buffer {
                        *number = T::nearest(*number).wide();
                    }
                }
                buffer
            }
        }
    }
}

/// Some outputs of one weight.
struct Task<'a, T> {
    weight: Rows<'a, T>,
    /// The results, one slice for each row.
    y: Vec<&'a mut [MaybeUninit<T>]>,
}

fn tasks<'a, T: Element>(
    mut y: &'a mut [MaybeUninit<T>],
    rows: usize,
    inputs: usize,
    weights: &[Rows<'a, T>],
) -> Vec<Task<'a, T>> {
    let mut tasks: Vec<Task<T>> = Vec::new();
    for &weight in weights {
        let outputs = weight.len(inputs);
        let (own, rest) = y.split_at_mut(rows * outputs);
        y = rest;
        let first = tasks.len();
        tasks.extend((0..outputs).step_by(TASK).map(|output| Task {
            weight: weight.slice(output..output + TASK, inputs),
            y: Vec::with_capacity(rows),
        }));
        for row in own.chunks_exact_mut(outputs.max(1)) {
            for (task, piece) in tasks[first..].iter_mut().zip(row.chunks_mut(TASK)) {
                task.y.push(piece);
            }
        }
    }
    tasks
}

struct Run<'a, T> {
    /// `[N, inputs]`
    x: &'a [f32],
    inputs: usize,
    task: Task<'a, T>,
}

impl<T: Element> WithSimd for Run<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, inputs, task } = self;
        let Task { weight, mut y } = task;
        // One row is bound by memory. More outputs at once hide its latency.
        let width = if y.len() == 1 { 2 * OUTPUTS } else { OUTPUTS };
        let mut buffer = vec![0.0; if weight.is_f32() { 0 } else { width * inputs }];
        let tiles = y.len().div_ceil(ROWS).max(1);
        let outputs = weight.len(inputs);
        for first in (0..outputs).step_by(width) {
            let after = outputs.min(first + width);
            let next = weight.slice(after..after + width, inputs);
            let w = (weight.slice(first..after, inputs)).widened(inputs, &mut buffer);
            // Tiles of about the same number of rows.
            let mut start = 0;
            for tile in 0..tiles {
                let end = (tile + 1) * y.len() / tiles;
                match next {
                    Rows::Elements(next) => prefetch(next, tile, tiles),
                    Rows::Blocks(next, _) => prefetch(next, tile, tiles),
                }
                let rows = &x[start * inputs..end * inputs];
                products(simd, rows, w, inputs, |row, output, sum| {
                    y[start + row][first + output].write(T::nearest(sum));
                });
                start = end;
            }
        }
    }
}

/// Computes the dot products of at most [`ROWS`] rows and at most twice [`OUTPUTS`] rows of a
/// weight.
#[inline(always)]
fn products<S: Simd>(
    simd: S,
    x: &[f32],
    w: &[f32],
    inputs: usize,
    mut write: impl FnMut(usize, usize, f32),
) {
    let rows = x.len() / inputs;
    if rows == 1 && w.len() == 2 * OUTPUTS * inputs {
        return tile::<S, 1, { 2 * OUTPUTS }>(simd, x, w, inputs, write);
    }
    for (index, w) in w.chunks(OUTPUTS * inputs).enumerate() {
        let mut write = |row, output, sum| write(row, index * OUTPUTS + output, sum);
        if w.len() == OUTPUTS * inputs {
            match rows {
                0 => (),
                1 => tile::<S, 1, OUTPUTS>(simd, x, w, inputs, write),
                2 => tile::<S, 2, OUTPUTS>(simd, x, w, inputs, write),
                3 => tile::<S, 3, OUTPUTS>(simd, x, w, inputs, write),
                4 => tile::<S, 4, OUTPUTS>(simd, x, w, inputs, write),
                5 => tile::<S, 5, OUTPUTS>(simd, x, w, inputs, write),
                _ => tile::<S, ROWS, OUTPUTS>(simd, x, w, inputs, write),
            }
            continue;
        }
        for (output, w) in w.chunks_exact(inputs).enumerate() {
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                tile::<S, 1, 1>(simd, x, w, inputs, |_, _, sum| write(row, output, sum));
            }
        }
    }
}

/// Returns the dot products of R rows and O rows of a weight.
#[inline(always)]
fn tile<S: Simd, const R: usize, const O: usize>(
    simd: S,
    x: &[f32],
    w: &[f32],
    inputs: usize,
    mut write: impl FnMut(usize, usize, f32),
) {
    let x: [_; R] = std::array::from_fn(|row| S::as_simd_f32s(&x[row * inputs..][..inputs]));
    let w: [_; O] = std::array::from_fn(|output| S::as_simd_f32s(&w[output * inputs..][..inputs]));
    let vectors = inputs / S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); O]; R];
    for i in 0..vectors {
        // SAFETY: each row has `inputs` elements, and so this many whole vectors.
        #[allow(unsafe_code)]
        let (x, w): ([_; R], [_; O]) = unsafe {
            (
                std::array::from_fn(|row| *x[row].0.get_unchecked(i)),
                std::array::from_fn(|output| *w[output].0.get_unchecked(i)),
            )
        };
        for row in 0..R {
            for output in 0..O {
                sums[row][output] = simd.mul_add_e_f32s(x[row], w[output], sums[row][output]);
            }
        }
    }
    if !inputs.is_multiple_of(S::F32_LANES) {
        let w = w.map(|(_, rest)| simd.partial_load_f32s(rest));
        for row in 0..R {
            let x = simd.partial_load_f32s(x[row].1);
            for output in 0..O {
                sums[row][output] = simd.mul_add_e_f32s(x, w[output], sums[row][output]);
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (output, sum) in sums.into_iter().enumerate() {
            write(row, output, simd.reduce_sum_f32s(sum));
        }
    }
}

/// Prefetches part `part` of `parts` of the next rows during the arithmetic of other rows.
#[inline(always)]
fn prefetch<T>(next: &[T], part: usize, parts: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        let line = LINE / size_of::<T>();
        let lines = next.len().div_ceil(line);
        for index in part * lines / parts..(part + 1) * lines / parts {
            // SAFETY: the address is inside the slice. A prefetch is a hint that each x86-64
            // processor has.
            #[allow(unsafe_code)]
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T1>(next.as_ptr().add(index * line).cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (next, part, parts);
}
