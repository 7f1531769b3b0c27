//! The CPU path of [`swiglu`](crate::swiglu()).

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::element::Element;
use super::simd::{BLOCK, MAX_LANES, sigmoid};
use super::slice::CHUNK;
use super::{output, slice};

/// Returns `silu(gate) * up`, element by element.
pub(crate) fn forward<T: Element>(gate: &[T], up: &[T]) -> Vec<T> {
    let fill = |y: &mut [MaybeUninit<T>]| {
        y.par_chunks_mut(CHUNK)
            .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
            .for_each(|(y, (gate, up))| Arch::new().dispatch(Forward { gate, up, y }));
    };
    // SAFETY: the chunks cover the result, and each chunk is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(gate.len(), fill)
    }
}

/// Returns the gradients of `gate` and `up`, in their shapes.
pub(crate) fn backward<T: Element>(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (gate_gradient, up_gradient) = slice::read::<T, _>(gate, |gate| {
        slice::read::<T, _>(up, |up| {
            slice::read::<T, _>(gradient, |gradient| Ok(backward_chunks(gate, up, gradient)))
        })
    })?;
    Ok((
        Tensor::from_vec(gate_gradient, gate.shape(), &Device::Cpu)?,
        Tensor::from_vec(up_gradient, up.shape(), &Device::Cpu)?,
    ))
}

fn backward_chunks<T: Element>(gate: &[T], up: &[T], gradient: &[T]) -> (Vec<T>, Vec<T>) {
    let inputs = gate
        .par_chunks(CHUNK)
        .zip(up.par_chunks(CHUNK).zip(gradient.par_chunks(CHUNK)));
    let fill = |gate_gradient: &mut [MaybeUninit<T>], up_gradient: &mut [MaybeUninit<T>]| {
        let outputs = gate_gradient
            .par_chunks_mut(CHUNK)
            .zip(up_gradient.par_chunks_mut(CHUNK));
        outputs
            .zip(inputs)
            .for_each(|((gate_gradient, up_gradient), (gate, (up, gradient)))| {
                Arch::new().dispatch(Backward {
                    gate,
                    up,
                    gradient,
                    gate_gradient,
                    up_gradient,
                });
            });
    };
    // SAFETY: the chunks cover both results, and each chunk is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::two_filled(gate.len(), fill)
    }
}

struct Forward<'a, T> {
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { gate, up, y } = self;
        // Whole f32 vectors go from input to result directly. Other dtypes and the tail use blocks
        // in f32.
        let direct = match (T::as_f32(gate), T::as_f32(up), T::as_uninit_f32(y)) {
            (Some(gate), Some(up), Some(y)) => {
                let (gates, _) = S::as_simd_f32s(gate);
                let (ups, _) = S::as_simd_f32s(up);
                let (ys, tail) = S::as_uninit_mut_simd_f32s(y);
                for ((y, &gate), &up) in ys.iter_mut().zip(gates).zip(ups) {
                    y.write(gated(simd, gate, up));
                }
                gate.len() - tail.len()
            }
            _ => 0,
        };
        let mut buffers = [[0.0; BLOCK]; 2];
        let [gate_buffer, up_buffer] = &mut buffers;
        let inputs = gate[direct..].chunks(BLOCK).zip(up[direct..].chunks(BLOCK));
        for ((gate, up), y) in inputs.zip(y[direct..].chunks_mut(BLOCK)) {
            let (len, padded) = (gate.len(), gate.len().next_multiple_of(MAX_LANES));
            T::widen(gate, &mut gate_buffer[..len]);
            T::widen(up, &mut up_buffer[..len]);
            let (gates, _) = S::as_mut_simd_f32s(&mut gate_buffer[..padded]);
            let (ups, _) = S::as_simd_f32s(&up_buffer[..padded]);
            for (gate, &up) in gates.iter_mut().zip(ups) {
                *gate = gated(simd, *gate, up);
            }
            T::write(&gate_buffer[..len], y);
        }
    }
}

/// Returns `silu(gate) up`.
#[inline(always)]
fn gated<S: Simd>(simd: S, gate: S::f32s, up: S::f32s) -> S::f32s {
    simd.mul_f32s(simd.mul_f32s(gate, sigmoid(simd, gate)), up)
}

struct Backward<'a, T> {
    gate: &'a [T],
    up: &'a [T],
    gradient: &'a [T],
    gate_gradient: &'a mut [MaybeUninit<T>],
    up_gradient: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            gate,
            up,
            gradient,
            gate_gradient,
            up_gradient,
        } = self;
        // The same split as in the forward pass.
        let inputs = (T::as_f32(gate), T::as_f32(up), T::as_f32(gradient));
        let outputs = (
            T::as_uninit_f32(gate_gradient),
            T::as_uninit_f32(up_gradient),
        );
        let direct = match (inputs, outputs) {
            ((Some(gate), Some(up), Some(gradient)), (Some(gate_gradient), Some(up_gradient))) => {
                let (gates, _) = S::as_simd_f32s(gate);
                let (ups, _) = S::as_simd_f32s(up);
                let (gradients, _) = S::as_simd_f32s(gradient);
                let (gate_gradients, _) = S::as_uninit_mut_simd_f32s(gate_gradient);
                let (up_gradients, tail) = S::as_uninit_mut_simd_f32s(up_gradient);
                let inputs = gates.iter().zip(ups).zip(gradients);
                let outputs = gate_gradients.iter_mut().zip(up_gradients);
                for (((&gate, &up), &gradient), (gate_gradient, up_gradient)) in inputs.zip(outputs)
                {
                    let [gate_slope, up_slope] = slopes(simd, gate, up, gradient);
                    gate_gradient.write(gate_slope);
                    up_gradient.write(up_slope);
                }
                gate.len() - tail.len()
            }
            _ => 0,
        };
        let mut buffers = [[0.0; BLOCK]; 3];
        let [gate_buffer, up_buffer, gradient_buffer] = &mut buffers;
        let inputs = gate[direct..]
            .chunks(BLOCK)
            .zip(up[direct..].chunks(BLOCK))
            .zip(gradient[direct..].chunks(BLOCK));
        let outputs = gate_gradient[direct..]
            .chunks_mut(BLOCK)
            .zip(up_gradient[direct..].chunks_mut(BLOCK));
        for (((gate, up), gradient), (gate_gradient, up_gradient)) in inputs.zip(outputs) {
            let (len, padded) = (gate.len(), gate.len().next_multiple_of(MAX_LANES));
            T::widen(gate, &mut gate_buffer[..len]);
            T::widen(up, &mut up_buffer[..len]);
            T::widen(gradient, &mut gradient_buffer[..len]);
            let (gates, _) = S::as_mut_simd_f32s(&mut gate_buffer[..padded]);
            let (ups, _) = S::as_mut_simd_f32s(&mut up_buffer[..padded]);
            let (gradients, _) = S::as_simd_f32s(&gradient_buffer[..padded]);
            for ((gate, up), &gradient) in gates.iter_mut().zip(ups).zip(gradients) {
                [*gate, *up] = slopes(simd, *gate, *up, gradient);
            }
            T::write(&gate_buffer[..len], gate_gradient);
            T::write(&up_buffer[..len], up_gradient);
        }
    }
}

/// Returns the gradients of `gate` and `up`.
#[inline(always)]
fn slopes<S: Simd>(simd: S, gate: S::f32s, up: S::f32s, gradient: S::f32s) -> [S::f32s; 2] {
    let sigmoid = sigmoid(simd, gate);
    let silu = simd.mul_f32s(gate, sigmoid);
    // The derivative of silu is s + x s (1 - s).
    let rest = simd.sub_f32s(simd.splat_f32s(1.0), sigmoid);
    let slope = simd.mul_add_e_f32s(silu, rest, sigmoid);
    [
        simd.mul_f32s(simd.mul_f32s(gradient, up), slope),
        simd.mul_f32s(gradient, silu),
    ]
}
