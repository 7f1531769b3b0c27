//! The CPU path of [`swiglu`](crate::swiglu()) and [`geglu`](crate::geglu()).

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::Activation;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{BLOCK, MAX_LANES, sigmoid, silu, silu_and_slope};
use crate::cpu::slice::CHUNK;
use crate::cpu::{output, slice};

/// Returns `activation(gate) * up`, element by element.
pub(crate) fn forward<T: Element>(gate: &[T], up: &[T], activation: Activation) -> Vec<T> {
    match activation {
        Activation::Silu => forward_chunks::<T, Silu>(gate, up),
        Activation::GeluTanh => forward_chunks::<T, GeluTanh>(gate, up),
    }
}

fn forward_chunks<T: Element, F: Function>(gate: &[T], up: &[T]) -> Vec<T> {
    let fill = |y: &mut [MaybeUninit<T>]| {
        y.par_chunks_mut(CHUNK)
            .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
            .for_each(|(y, (gate, up))| vectors().dispatch(Forward::<T, F>::new(gate, up, y)));
    };
    // SAFETY: the chunks cover the result, and each chunk is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(gate.len(), fill)
    }
}

/// Returns the gradients with respect to `gate` and `up`, in their shapes.
pub(crate) fn backward<T: Element>(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
    activation: Activation,
) -> Result<(Tensor, Tensor)> {
    let chunks = match activation {
        Activation::Silu => backward_chunks::<T, Silu>,
        Activation::GeluTanh => backward_chunks::<T, GeluTanh>,
    };
    let (gate_gradient, up_gradient) = slice::read::<T, _>(gate, |gate| {
        slice::read::<T, _>(up, |up| {
            slice::read::<T, _>(gradient, |gradient| Ok(chunks(gate, up, gradient)))
        })
    })?;
    Ok((
        Tensor::from_vec(gate_gradient, gate.shape(), &Device::Cpu)?,
        Tensor::from_vec(up_gradient, up.shape(), &Device::Cpu)?,
    ))
}

fn backward_chunks<T: Element, F: Function>(
    gate: &[T],
    up: &[T],
    gradient: &[T],
) -> (Vec<T>, Vec<T>) {
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
                vectors().dispatch(Backward::<T, F> {
                    gate,
                    up,
                    gradient,
                    gate_gradient,
                    up_gradient,
                    function: PhantomData,
                });
            });
    };
    // SAFETY: the chunks cover both results, and each chunk is written completely.
    #[allow(unsafe_code)]
    unsafe {
        output::two_filled(gate.len(), fill)
    }
}

/// An activation function.
trait Function: Send + Sync {
    fn value<S: Simd>(simd: S, x: S::f32s) -> S::f32s;

    /// Returns the value and the derivative.
    fn value_and_slope<S: Simd>(simd: S, x: S::f32s) -> [S::f32s; 2];
}

/// `x sigmoid(x)`.
struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn value<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        silu(simd, x)
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(simd: S, x: S::f32s) -> [S::f32s; 2] {
        silu_and_slope(simd, x)
    }
}

/// `x / 2 (1 + tanh(u))`, which is `x sigmoid(2 u)`, with `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
struct GeluTanh;

/// `2 sqrt(2 / pi)`.
const TWICE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

impl GeluTanh {
    /// Returns `x^2` and `sigmoid(2 u)`.
    #[inline(always)]
    fn parts<S: Simd>(simd: S, x: S::f32s) -> [S::f32s; 2] {
        let square = simd.mul_f32s(x, x);
        let one = simd.splat_f32s(1.0);
        let factor = simd.mul_add_e_f32s(square, simd.splat_f32s(CUBIC), one);
        let inner = simd.mul_f32s(simd.mul_f32s(x, factor), simd.splat_f32s(TWICE));
        [square, sigmoid(simd, inner)]
    }
}

impl Function for GeluTanh {
    #[inline(always)]
    fn value<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        let [_, sigmoid] = Self::parts(simd, x);
        simd.mul_f32s(x, sigmoid)
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(simd: S, x: S::f32s) -> [S::f32s; 2] {
        let [square, sigmoid] = Self::parts(simd, x);
        let gelu = simd.mul_f32s(x, sigmoid);
        let one = simd.splat_f32s(1.0);
        // The derivative is s + x s (1 - s) 2 u', with 2 u' = 2 sqrt(2 / pi) (1 + 3 0.044715 x^2).
        let inner = simd.mul_add_e_f32s(square, simd.splat_f32s(3.0 * CUBIC), one);
        let inner = simd.mul_f32s(inner, simd.splat_f32s(TWICE));
        let rest = simd.mul_f32s(simd.sub_f32s(one, sigmoid), inner);
        [gelu, simd.mul_add_e_f32s(gelu, rest, sigmoid)]
    }
}

struct Forward<'a, T, F> {
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [MaybeUninit<T>],
    function: PhantomData<F>,
}

impl<'a, T, F> Forward<'a, T, F> {
    fn new(gate: &'a [T], up: &'a [T], y: &'a mut [MaybeUninit<T>]) -> Self {
        Self {
            gate,
            up,
            y,
            function: PhantomData,
        }
    }
}

impl<T: Element, F: Function> WithSimd for Forward<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { gate, up, y, .. } = self;
        // Whole f32 vectors go directly from input to result. Other dtypes and the tail use f32
        // blocks.
        let direct = match (T::as_f32(gate), T::as_f32(up), T::as_uninit_f32(y)) {
            (Some(gate), Some(up), Some(y)) => {
                let (gates, _) = S::as_simd_f32s(gate);
                let (ups, _) = S::as_simd_f32s(up);
                let (ys, tail) = S::as_uninit_mut_simd_f32s(y);
                for ((y, &gate), &up) in ys.iter_mut().zip(gates).zip(ups) {
                    y.write(gated::<S, F>(simd, gate, up));
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
                *gate = gated::<S, F>(simd, *gate, up);
            }
            T::write(&gate_buffer[..len], y);
        }
    }
}

/// Returns the activation at `gate`, times `up`.
#[inline(always)]
fn gated<S: Simd, F: Function>(simd: S, gate: S::f32s, up: S::f32s) -> S::f32s {
    simd.mul_f32s(F::value(simd, gate), up)
}

struct Backward<'a, T, F> {
    gate: &'a [T],
    up: &'a [T],
    gradient: &'a [T],
    gate_gradient: &'a mut [MaybeUninit<T>],
    up_gradient: &'a mut [MaybeUninit<T>],
    function: PhantomData<F>,
}

impl<T: Element, F: Function> WithSimd for Backward<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            gate,
            up,
            gradient,
            gate_gradient,
            up_gradient,
            ..
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
                    let [gate_slope, up_slope] = slopes::<S, F>(simd, gate, up, gradient);
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
                [*gate, *up] = slopes::<S, F>(simd, *gate, *up, gradient);
            }
            T::write(&gate_buffer[..len], gate_gradient);
            T::write(&up_buffer[..len], up_gradient);
        }
    }
}

/// Returns the gradients with respect to `gate` and `up`.
#[inline(always)]
fn slopes<S: Simd, F: Function>(
    simd: S,
    gate: S::f32s,
    up: S::f32s,
    gradient: S::f32s,
) -> [S::f32s; 2] {
    let [value, slope] = F::value_and_slope(simd, gate);
    [
        simd.mul_f32s(simd.mul_f32s(gradient, up), slope),
        simd.mul_f32s(gradient, value),
    ]
}
