//! The CPU path of [`DeltaStates`](crate::DeltaStates).
//!
//! Rows are processed one at a time, so a row's bits do not depend on how its sequence was divided
//! into passes.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::SlotRows;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{add_scaled, map, map_pairs};
use crate::cpu::{output, slice};
use crate::ops::causal_conv::cpu::{Row, taps_first};
use crate::ops::gated_delta_rule::GatedDeltaRule;
use crate::ops::gated_delta_rule::cpu::{Chunk, Inputs, Task, by_task};

/// Returns the convolution of the contiguous rows `x`, and advances `windows`
/// `[slots, taps - 1, channels]`.
pub(crate) fn causal_conv<T: Element>(
    windows: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    batch: &[SlotRows],
) -> Result<Vec<T>> {
    let (channels, taps) = weight.dims2()?;
    let weight = slice::read::<T, _>(weight, |weight| Ok(taps_first(weight, channels)))?;
    let mut y = Vec::new();
    slice::read::<T, _>(x, |x| {
        let mut wide = vec![0.0; if T::as_f32(x).is_some() { 0 } else { x.len() }];
        let x = T::widened(x, &mut wide);
        let mut advance = |windows: &mut [f32]| {
            let window = (taps - 1) * channels;
            let fill = |y: &mut [MaybeUninit<T>]| convolve(x, windows, &weight, channels, batch, y);
            // SAFETY: the rows cover the result, and each is written completely.
            #[allow(unsafe_code)]
            unsafe {
                y = output::filled(x.len(), fill);
            }
            let mut first = 0;
            for sequence in batch {
                let rows = &x[first * channels..][..sequence.rows * channels];
                let window = &mut windows[sequence.slot * window..][..window];
                if rows.len() < window.len() {
                    window.copy_within(rows.len().., 0);
                }
                let kept = rows.len().min(window.len());
                let end = window.len();
                window[end - kept..].copy_from_slice(&rows[rows.len() - kept..]);
                first += sequence.rows;
            }
            Ok(())
        };
        match taps {
            // Candle cannot write to an empty tensor.
            1 => advance(&mut []),
            _ => slice::write_f32(windows, advance),
        }
    })?;
    Ok(y)
}

fn convolve<T: Element>(
    x: &[f32],
    windows: &[f32],
    weight: &[f32],
    channels: usize,
    batch: &[SlotRows],
    y: &mut [MaybeUninit<T>],
) {
    let past = weight.len() / channels - 1;
    // Each row's slot, and its first row in this pass.
    let mut rows = Vec::new();
    for sequence in batch {
        let first = rows.len();
        rows.resize(first + sequence.rows, (sequence.slot, first));
    }
    y.par_chunks_exact_mut(channels)
        .zip(rows)
        .enumerate()
        .for_each_init(
            || (vec![0.0; channels], vec![0.0; channels]),
            |(sum, buffer), (row, (y, (slot, first)))| {
                let new = x[first * channels..=(row + 1) * channels - 1].chunks_exact(channels);
                let window = &windows[slot * past * channels..][..past * channels];
                let old = window.chunks_exact(channels);
                vectors().dispatch(Row {
                    rows: new.rev().chain(old.rev()).map(Some),
                    weight,
                    sum,
                    buffer,
                });
                T::write(sum, y);
            },
        );
}

/// Returns the result for contiguous inputs, and advances `states`
/// `[slots, value_heads, key_dim, value_dim]`.
pub(crate) fn gated_delta_rule<T: Element>(
    states: &Tensor,
    [qkv, g, beta]: [&Tensor; 3],
    op: &GatedDeltaRule,
    batch: &[SlotRows],
) -> Result<Vec<T>> {
    let heads = &op.heads;
    let mut o = Vec::new();
    slice::read::<T, _>(qkv, |qkv| {
        slice::read::<f32, _>(g, |g| {
            slice::read::<f32, _>(beta, |beta| {
                slice::write_f32(states, |states| {
                    let inputs = Inputs { qkv, g, beta };
                    let of_slot = heads.value_heads * heads.key_dim * heads.value_dim;
                    let mut slots: Vec<_> = states.chunks_exact_mut(of_slot).map(Some).collect();
                    let states: Vec<_> = batch
                        .iter()
                        .filter_map(|sequence| slots[sequence.slot].take())
                        .flat_map(|slot| slot.chunks_exact_mut(of_slot / heads.key_heads))
                        .collect();
                    let fill = |o: &mut [MaybeUninit<T>]| {
                        by_task(o, op, &[heads.group() * heads.value_dim])
                            .into_par_iter()
                            .zip(states)
                            .enumerate()
                            .for_each(|(index, (o, states))| {
                                let task = Task::new(index, &inputs, op);
                                vectors().dispatch(Rows { task, states, o });
                            });
                    };
                    // SAFETY: the tasks partition the result, and each writes its whole part. The
                    // slots are distinct, so each task has states.
                    #[allow(unsafe_code)]
                    unsafe {
                        o = output::filled(op.tree.rows() * heads.values(), fill);
                    }
                    Ok(())
                })
            })
        })
    })?;
    Ok(o)
}

/// Rows for one sequence and key head.
struct Rows<'a, 'b, T> {
    task: Task<'a, T>,
    /// `[group, key_dim, value_dim]`
    states: &'b mut [f32],
    o: Vec<&'b mut [MaybeUninit<T>]>,
}

impl<T: Element> WithSimd for Rows<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { task, states, o } = self;
        let (key_dim, dim) = (task.heads.key_dim, task.heads.value_dim);
        let mut keys = vec![0.0; 2 * key_dim];
        let mut buffers = vec![0.0; 3 * dim];
        let (read, rest) = buffers.split_at_mut(dim);
        let (change, result) = rest.split_at_mut(dim);
        let first = task.first_row();
        for (row, o) in o.into_iter().enumerate() {
            let row = Chunk {
                first: first + row,
                rows: 1,
                place: row,
            };
            task.normalize(simd, row, &mut keys, &mut [0.0; 2]);
            let (key, query) = keys.split_at(key_dim);
            for (head, state) in states.chunks_exact_mut(key_dim * dim).enumerate() {
                let (g, beta) = task.gates(row.first, head);
                let (decay, beta) = (g.exp(), simd.splat_f32s(beta));
                read.fill(0.0);
                for (state, &key) in state.chunks_exact(dim).zip(key) {
                    add_scaled(simd, read, key, state);
                }
                T::widen(task.value(row.first, head), change);
                add_scaled(simd, change, -decay, read);
                map(simd, change, |x| simd.mul_f32s(x, beta));
                result.fill(0.0);
                let decay = simd.splat_f32s(decay);
                for (state, (&key, &query)) in
                    state.chunks_exact_mut(dim).zip(key.iter().zip(query))
                {
                    let key = simd.splat_f32s(key);
                    map_pairs(simd, state, change, |state, change| {
                        simd.mul_add_e_f32s(key, change, simd.mul_f32s(decay, state))
                    });
                    add_scaled(simd, result, query, state);
                }
                T::write(result, &mut o[head * dim..][..dim]);
            }
        }
    }
}
