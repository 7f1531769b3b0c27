//! The CPU path of [`squared_gradient_norms`](crate::squared_gradient_norms) and
//! [`scale_gradients`](crate::scale_gradients).

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::BLOCK;
use crate::cpu::slice::{CHUNK, range, with_floats};

/// Returns each gradient's sum of squares, f64 `[n]`.
pub(crate) fn squared_norms(gradients: &[&Tensor]) -> Result<Tensor> {
    let sums = gradients
        .par_iter()
        .map(|gradient| {
            let gradient = gradient.contiguous()?;
            let (storage, layout) = gradient.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else {
                bail!("gradients: one is not on the CPU");
            };
            let range = range(layout)?;
            Ok(with_floats!(storage, "gradients", values => squared_norm(&values[range])))
        })
        .collect::<Result<Vec<f64>>>()?;
    let count = sums.len();
    Tensor::from_vec(sums, count, &Device::Cpu)
}

fn squared_norm<T: Element>(values: &[T]) -> f64 {
    let chunk_sums: Vec<f64> = values
        .par_chunks(CHUNK)
        .map(|chunk| vectors().dispatch(|| sum_of_squares(chunk)))
        .collect();
    // Added in order, however chunks are assigned to threads.
    chunk_sums.into_iter().sum()
}

#[inline(always)]
fn sum_of_squares<T: Element>(values: &[T]) -> f64 {
    // Independent sums hide the latency of additions.
    const SUMS: usize = 32;
    let mut sums = [0f64; SUMS];
    let mut buffer = [0f32; BLOCK];
    for block in values.chunks(BLOCK) {
        let block = T::widened(block, &mut buffer[..block.len()]);
        let (parts, rest) = block.as_chunks::<SUMS>();
        for part in parts {
            for (sum, &x) in sums.iter_mut().zip(part) {
                *sum += f64::from(x) * f64::from(x);
            }
        }
        for (sum, &x) in sums.iter_mut().zip(rest) {
            *sum += f64::from(x) * f64::from(x);
        }
    }
    sums.into_iter().sum()
}

/// Multiplies gradients that do not share memory by `factor`.
pub(crate) fn scale(gradients: &[&Tensor], factor: f32) -> Result<()> {
    gradients
        .par_iter()
        .try_for_each(|gradient| gradient.inplace_op1(&Scale(factor)))
}

struct Scale(f32);

impl InplaceOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale_gradients"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let range = range(layout)?;
        with_floats!(storage, "gradients", values => scale_slice(&mut values[range], self.0));
        Ok(())
    }
}

fn scale_slice<T: Element>(values: &mut [T], factor: f32) {
    values.par_chunks_mut(CHUNK).for_each(|chunk| {
        vectors().dispatch(|| {
            let mut buffer = [0f32; BLOCK];
            for block in chunk.chunks_mut(BLOCK) {
                let wide = &mut buffer[..block.len()];
                T::widen(block, wide);
                for (target, &x) in block.iter_mut().zip(&*wide) {
                    *target = T::nearest(x * factor);
                }
            }
        });
    });
}
