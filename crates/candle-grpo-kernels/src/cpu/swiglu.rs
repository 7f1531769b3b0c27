//! The CPU path of [`swiglu`](crate::swiglu()).

use std::mem::MaybeUninit;

use candle_core::{Device, Result, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::element::Element;
use super::simd::{BLOCK, MAX_LANES, sigmoid};
use super::{output, slice};

/// Elements of any shape to `silu(gate) * up`.
pub(crate) fn forward<T: Element>(gate: &[T], up: &[T]) -> Vec<T> {
    let fill = |y: &mut [MaybeUninit<T>]| {
        y.par_chunks_mut(BLOCK)
            .zip(gate.par_chunks(BLOCK).zip(up.par_chunks(BLOCK)))
            .for_each(|(y, (gate, up))| Arch::new().dispatch(ForwardBlock { gate, up, y }));
    };
    // SAFETY: the blocks cover the result, and each block is written whole.
    #[allow(unsafe_code)]
    unsafe {
        output::filled(gate.len(), fill)
    }
}

/// The gradients of `gate` and `up`, of their shapes.
pub(crate) fn backward<T: Element>(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (gate_gradient, up_gradient) = slice::read::<T, _>(gate, |gate| {
        slice::read::<T, _>(up, |up| {
            slice::read::<T, _>(gradient, |gradient| Ok(backward_blocks(gate, up, gradient)))
        })
    })?;
    Ok((
        Tensor::from_vec(gate_gradient, gate.shape(), &Device::Cpu)?,
        Tensor::from_vec(up_gradient, up.shape(), &Device::Cpu)?,
    ))
}

fn backward_blocks<T: Element>(gate: &[T], up: &[T], gradient: &[T]) -> (Vec<T>, Vec<T>) {
    let inputs = gate
        .par_chunks(BLOCK)
        .zip(up.par_chunks(BLOCK).zip(gradient.par_chunks(BLOCK)));
    let fill = |gate_gradient: &mut [MaybeUninit<T>], up_gradient: &mut [MaybeUninit<T>]| {
        let outputs = gate_gradient
            .par_chunks_mut(BLOCK)
            .zip(up_gradient.par_chunks_mut(BLOCK));
        outputs
            .zip(inputs)
            .for_each(|((gate_gradient, up_gradient), (gate, (up, gradient)))| {
                Arch::new().dispatch(BackwardBlock {
                    gate,
                    up,
                    gradient,
                    gate_gradient,
                    up_gradient,
                });
            });
    };
    // SAFETY: the blocks cover both results, and each block is written whole.
    #[allow(unsafe_code)]
    unsafe {
        output::two_filled(gate.len(), fill)
    }
}

struct ForwardBlock<'a, T> {
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for ForwardBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let len = self.gate.len();
        let (mut gate, mut up) = ([0.0; BLOCK], [0.0; BLOCK]);
        T::widen(self.gate, &mut gate[..len]);
        T::widen(self.up, &mut up[..len]);
        let padded = len.next_multiple_of(MAX_LANES);
        let (gates, _) = S::as_mut_simd_f32s(&mut gate[..padded]);
        let (ups, _) = S::as_simd_f32s(&up[..padded]);
        for (x, &up) in gates.iter_mut().zip(ups) {
            *x = simd.mul_f32s(simd.mul_f32s(*x, sigmoid(simd, *x)), up);
        }
        T::write(&gate[..len], self.y);
    }
}

struct BackwardBlock<'a, T> {
    gate: &'a [T],
    up: &'a [T],
    gradient: &'a [T],
    gate_gradient: &'a mut [MaybeUninit<T>],
    up_gradient: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for BackwardBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let len = self.gate.len();
        let (mut gate, mut up, mut gradient) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        T::widen(self.gate, &mut gate[..len]);
        T::widen(self.up, &mut up[..len]);
        T::widen(self.gradient, &mut gradient[..len]);
        let padded = len.next_multiple_of(MAX_LANES);
        let (gates, _) = S::as_mut_simd_f32s(&mut gate[..padded]);
        let (ups, _) = S::as_mut_simd_f32s(&mut up[..padded]);
        let (gradients, _) = S::as_simd_f32s(&gradient[..padded]);
        let one = simd.splat_f32s(1.0);
        for ((x, up), &gradient) in gates.iter_mut().zip(ups).zip(gradients) {
            let sigmoid = sigmoid(simd, *x);
            let silu = simd.mul_f32s(*x, sigmoid);
            // The derivative of silu: s + x s (1 - s).
            let slope = simd.mul_add_e_f32s(silu, simd.sub_f32s(one, sigmoid), sigmoid);
            *x = simd.mul_f32s(simd.mul_f32s(gradient, *up), slope);
            *up = simd.mul_f32s(gradient, silu);
        }
        T::write(&gate[..len], self.gate_gradient);
        T::write(&up[..len], self.up_gradient);
    }
}
