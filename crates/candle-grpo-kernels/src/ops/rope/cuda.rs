//! The CUDA path of [`rope`](crate::rope()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::{D, Layout, Result, Shape, Tensor};

use super::Rope;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels};
use crate::ops::head_transform::cuda as head_transform;
use crate::ops::rms_norm::RmsNormOptions;

/// Threads per block, as in the kernel.
const THREADS: u32 = 256;

/// Rotates contiguous `x` `[.., heads * D]`.
pub(crate) fn rotate(x: &CudaStorage, layout: &Layout, op: &Rope) -> Result<CudaStorage> {
    let pairs = op.cos.dim(D::Minus1)?;
    let (n, head_dim) = (op.cos.elem_count() / pairs, 2 * pairs);
    let shape = head_transform::Shape {
        n,
        heads: layout.dims().last().map_or(0, |width| width / head_dim),
        kv_heads: 0,
        query_step: head_dim,
        head_dim,
        pairs,
    };
    let operands = head_transform::Operands {
        weights: None,
        options: RmsNormOptions::default(),
        angles: Some([op.cos.clone(), op.sin.clone()]),
    };
    let [rotated, _] = head_transform::forward((x, layout), None, (&operands, op.back), shape)?;
    Ok(rotated)
}

/// Returns the cosine and sine of contiguous u32 `positions` times contiguous f32
/// `inverse_frequencies`.
pub(crate) fn angles(
    positions: &Tensor,
    inverse_frequencies: &Tensor,
    factor: f32,
) -> Result<(Tensor, Tensor)> {
    let device = positions.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, pairs) = (positions.elem_count(), inverse_frequencies.elem_count());
    let (positions, frequencies) = (
        positions.storage_and_layout(),
        inverse_frequencies.storage_and_layout(),
    );
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let (mut cos, mut sin) = unsafe {
        (
            alloc::<f32>(device, n * pairs)?,
            alloc::<f32>(device, n * pairs)?,
        )
    };
    if n * pairs > 0 {
        // SAFETY: the results have an element for each position and frequency, and the blocks cover
        // them.
        #[allow(unsafe_code)]
        unsafe {
            kernels::rope_angles {
                positions: In::from_tensor(&positions, &stream)?,
                inverse_frequencies: In::from_tensor(&frequencies, &stream)?,
                cos: Out::new(&mut cos, &stream),
                sin: Out::new(&mut sin, &stream),
                n: n as u64,
                pairs: pairs as u32,
                factor,
            }
            .launch(
                device,
                grid((n * pairs).div_ceil(THREADS as usize), THREADS)?,
            )?;
        }
    }
    let tensor = |x| {
        as_tensor(
            CudaStorage::wrap_cuda_slice(x, device.clone()),
            &Shape::from((n, pairs)),
        )
    };
    Ok((tensor(cos), tensor(sin)))
}
