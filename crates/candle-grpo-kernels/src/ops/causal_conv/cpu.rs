//! The CPU path of [`causal_conv`](crate::causal_conv()).
//!
//! The forward pass distributes rows over the cores. The backward pass distributes channel blocks,
//! so that the weight gradient is summed over rows in order.

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::CausalConv;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{add_products, multiply_by_silu_slope, silu_in_place};
use crate::cpu::{output, slice};
use crate::prefix_tree::PrefixTree;

/// Channels per task in the backward pass.
const BLOCK: usize = 256;

/// Returns the result `[N, channels]`.
pub(crate) fn forward<T: Element>(
    x: &[T],
    weight: &[T],
    channels: usize,
    op: &CausalConv,
) -> Vec<T> {
    let weight = taps_first(weight, channels);
    let fill = |y: &mut [MaybeUninit<T>]| {
        y.par_chunks_exact_mut(channels).enumerate().for_each_init(
            || (vec![0.0; channels], vec![0.0; channels]),
            |(sum, buffer), (row, y)| {
                let rows = taps(op, row, weight.len() / channels);
                let rows = rows.map(|row| Some(&x[row? * channels..][..channels]));
                vectors().dispatch(Row {
                    rows,
                    weight: &weight,
                    sum,
                    buffer,
                });
                T::write(sum, y);
            },
        );
    };
    // SAFETY: the rows cover the result, and each is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(x.len(), fill)
    }
}

/// Returns `weight` `[channels, taps]` as f32 `[taps, channels]`.
pub(crate) fn taps_first<T: Element>(weight: &[T], channels: usize) -> Vec<f32> {
    let taps = weight.len() / channels;
    let mut transposed = vec![0.0; weight.len()];
    for (channel, weight) in weight.chunks_exact(taps).enumerate() {
        for (tap, weight) in weight.iter().enumerate() {
            transposed[tap * channels + channel] = weight.wide();
        }
    }
    transposed
}

/// Returns the row for each tap, the last first. Rows before the sequence are `None`.
fn taps(op: &CausalConv, row: usize, taps: usize) -> impl Iterator<Item = Option<usize>> {
    let before = op.tree.before();
    let mut next = Some(row);
    (0..taps).map(move |_| {
        let row = next?;
        next = Some(before[row])
            .filter(|&row| row != PrefixTree::NONE)
            .map(|row| row as usize);
        Some(row)
    })
}

/// Computes a result row in `sum`. `rows` yields the last tap's row first.
pub(crate) struct Row<'a, T: 'a, I: Iterator<Item = Option<&'a [T]>>> {
    pub(crate) rows: I,
    /// `[taps, channels]`
    pub(crate) weight: &'a [f32],
    pub(crate) sum: &'a mut [f32],
    pub(crate) buffer: &'a mut [f32],
}

impl<'a, T: Element, I: Iterator<Item = Option<&'a [T]>>> WithSimd for Row<'a, T, I> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            weight,
            sum,
            buffer,
        } = self;
        sum.fill(0.0);
        for (row, weight) in rows.zip(weight.chunks_exact(sum.len()).rev()) {
            let Some(row) = row else { continue };
            add_products(simd, sum, T::widened(row, buffer), weight);
        }
        silu_in_place(simd, sum);
    }
}

/// Returns the gradients with respect to `x` and `weight`, in their shapes.
pub(crate) fn backward<T: Element>(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    op: &CausalConv,
) -> Result<(Tensor, Tensor)> {
    let channels = x.dim(1)?;
    let (x_gradient, weight_gradient) = slice::read::<T, _>(x, |x| {
        slice::read::<T, _>(weight, |weight| {
            slice::read::<T, _>(gradient, |gradient| {
                let weight = taps_first(weight, channels);
                Ok(backward_of_slices(x, &weight, gradient, channels, op))
            })
        })
    })?;
    Ok((
        Tensor::from_vec(x_gradient, x.shape(), &Device::Cpu)?,
        Tensor::from_vec(weight_gradient, weight.shape(), &Device::Cpu)?,
    ))
}

fn backward_of_slices<T: Element>(
    x: &[T],
    weight: &[f32],
    gradient: &[T],
    channels: usize,
    op: &CausalConv,
) -> (Vec<T>, Vec<T>) {
    let taps = weight.len() / channels;
    let mut weight_gradients = Vec::new();
    let fill = |x_gradient: &mut [MaybeUninit<T>]| {
        let mut blocks: Vec<Vec<_>> = Vec::new();
        blocks.resize_with(channels.div_ceil(BLOCK), || {
            Vec::with_capacity(op.tree.rows())
        });
        for row in x_gradient.chunks_exact_mut(channels) {
            for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(BLOCK)) {
                block.push(piece);
            }
        }
        weight_gradients = blocks
            .into_par_iter()
            .enumerate()
            .map_init(Scratch::default, |scratch, (index, x_gradient)| {
                let first = index * BLOCK;
                let columns = BLOCK.min(channels - first);
                scratch.load(x, weight, [first, columns, channels], taps);
                vectors().dispatch(BackwardBlock {
                    op,
                    gradient,
                    first,
                    columns,
                    channels,
                    scratch,
                });
                let rows = scratch.x_gradient.chunks_exact(columns);
                for (source, target) in rows.zip(x_gradient) {
                    T::write(source, target);
                }
                scratch.weight_gradient.clone()
            })
            .collect();
    };
    // SAFETY: the blocks cover the result, and each is written completely.
    #[allow(unsafe_code)]
    let x_gradient = unsafe { output::filled(x.len(), fill) };
    let mut weight_gradient = Vec::with_capacity(weight.len());
    for block in weight_gradients {
        let columns = block.len() / taps;
        for column in 0..columns {
            let taps = block[column..].iter().step_by(columns);
            weight_gradient.extend(taps.map(|&sum| T::nearest(sum)));
        }
    }
    (x_gradient, weight_gradient)
}

/// Buffers for a column block.
#[derive(Default)]
struct Scratch {
    /// `[N, columns]`
    x: Vec<f32>,
    x_gradient: Vec<f32>,
    /// `[taps, columns]`
    weight: Vec<f32>,
    weight_gradient: Vec<f32>,
    /// The gradient with respect to the result, then to the sum before silu.
    gradient: Vec<f32>,
    sum: Vec<f32>,
}

impl Scratch {
    /// Loads the columns from `x` and `weight`, and zeroes the gradients.
    fn load<T: Element>(
        &mut self,
        x: &[T],
        weight: &[f32],
        [first, columns, channels]: [usize; 3],
        taps: usize,
    ) {
        let rows = x.len() / channels;
        self.x.resize(rows * columns, 0.0);
        for (source, target) in x
            .chunks_exact(channels)
            .zip(self.x.chunks_exact_mut(columns))
        {
            T::widen(&source[first..][..columns], target);
        }
        self.weight.clear();
        for tap in weight.chunks_exact(channels) {
            self.weight.extend_from_slice(&tap[first..][..columns]);
        }
        for (buffer, len) in [
            (&mut self.x_gradient, rows * columns),
            (&mut self.weight_gradient, taps * columns),
            (&mut self.gradient, columns),
            (&mut self.sum, columns),
        ] {
            buffer.clear();
            buffer.resize(len, 0.0);
        }
    }
}

/// Computes the gradients for a column block.
struct BackwardBlock<'a, T> {
    op: &'a CausalConv,
    gradient: &'a [T],
    first: usize,
    columns: usize,
    channels: usize,
    scratch: &'a mut Scratch,
}

impl<T: Element> WithSimd for BackwardBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            op,
            gradient,
            first,
            columns,
            channels,
            scratch,
        } = self;
        let Scratch {
            x,
            x_gradient,
            weight,
            weight_gradient,
            gradient: of_sum,
            sum,
        } = scratch;
        let tap_count = weight.len() / columns;
        for (row, gradient) in gradient.chunks_exact(channels).enumerate() {
            T::widen(&gradient[first..][..columns], of_sum);
            sum.fill(0.0);
            let of_row = || taps(op, row, tap_count).zip((0..tap_count).rev());
            for (row, tap) in of_row() {
                let Some(row) = row else { break };
                let weight = &weight[tap * columns..][..columns];
                add_products(simd, sum, &x[row * columns..][..columns], weight);
            }
            multiply_by_silu_slope(simd, of_sum, sum);
            for (row, tap) in of_row() {
                let Some(row) = row else { break };
                let (row, tap) = (row * columns, tap * columns);
                let weight_gradient = &mut weight_gradient[tap..][..columns];
                add_products(simd, weight_gradient, &x[row..][..columns], of_sum);
                let x_gradient = &mut x_gradient[row..][..columns];
                add_products(simd, x_gradient, &weight[tap..][..columns], of_sum);
            }
        }
    }
}
