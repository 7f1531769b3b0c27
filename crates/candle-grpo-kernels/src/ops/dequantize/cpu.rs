//! The CPU path of [`dequantize`](crate::dequantize()).

use std::mem::MaybeUninit;

use candle_core::quantized::GgmlDType;
use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::cpu::blocks::widen;
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::{output, slice};

/// Number of blocks that one thread processes at a time.
const TASK: usize = 256;

/// Returns the values in contiguous `blocks` with type `block_type`.
pub(crate) fn dequantize<T: Element>(blocks: &Tensor, block_type: GgmlDType) -> Result<Vec<T>> {
    let (size, bytes) = (block_type.block_size(), block_type.type_size());
    slice::read::<u8, _>(blocks, |blocks| {
        let fill = |y: &mut [MaybeUninit<T>]| {
            y.par_chunks_mut(TASK * size)
                .zip(blocks.par_chunks(TASK * bytes))
                .for_each(|(y, blocks)| {
                    vectors().dispatch(Run {
                        blocks,
                        block_type,
                        y,
                    });
                });
        };
        // SAFETY: the tasks partition the results, and each writes its whole part.
        #[allow(unsafe_code)]
        Ok(unsafe { output::filled(blocks.len() / bytes * size, fill) })
    })
}

struct Run<'a, T> {
    blocks: &'a [u8],
    block_type: GgmlDType,
    y: &'a mut [MaybeUninit<T>],
}

impl<T: Element> WithSimd for Run<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut buffer = vec![0.0; self.y.len()];
        widen(self.blocks, self.block_type, &mut buffer);
        T::write(&buffer, self.y);
    }
}
