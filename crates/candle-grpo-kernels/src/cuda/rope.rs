//! The CUDA path of [`rope`](crate::rope()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Layout, Result, Shape, Tensor, bail};

use super::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::rope::Rope;

/// Threads of a block, as in the kernel.
const THREADS: u32 = 256;

/// Rotates a contiguous `x` `[.., heads * D]`.
pub(crate) fn rotate(x: &CudaStorage, layout: &Layout, op: &Rope) -> Result<(CudaStorage, Shape)> {
    let device = x.device();
    let stream = device.cuda_stream();
    let elements = layout.shape().elem_count();
    let (Some(&width), Some(&pairs)) = (layout.dims().last(), op.cos.dims().last()) else {
        bail!("rope: a scalar");
    };
    let (heads, all_heads) = (width / (2 * pairs), elements / (2 * pairs));
    let cos = op.cos.storage_and_layout();
    let sin = op.sin.storage_and_layout();
    let y = with_cuda_floats!(x, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, elements)? };
        if all_heads > 0 {
            // A thread for each 16 bytes of half a head, up to a warp.
            let threads = (pairs * size_of::<T>()).div_ceil(16).clamp(1, 32) as u32;
            let per_block = THREADS / threads;
            // The index of a head exceeds the last one by less than a block.
            if all_heads > (u32::MAX - THREADS) as usize || all_heads.div_ceil(per_block as usize) > i32::MAX as usize {
                bail!("x: shape {:?}, has more heads than one launch takes", layout.dims());
            }
            let grid = LaunchConfig {
                grid_dim: (all_heads.div_ceil(per_block as usize) as u32, 1, 1),
                block_dim: (threads, per_block, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: x and y have all_heads * 2 * pairs elements, cos and sin
            // all_heads / heads * pairs.
            #[allow(unsafe_code)]
            unsafe {
                kernels::rope::<T> { x: In::new(x, layout, &stream)?, cos: In::from_tensor(&cos, &stream)?, sin: In::from_tensor(&sin, &stream)?, y: Out::new(&mut y, &stream), heads_in_all: all_heads as u32, heads: heads as u32, pairs: pairs as i32, sign: if op.back { -1.0 } else { 1.0 } }.launch(device, grid)?;
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok((y, layout.shape().clone()))
}

/// Returns cosines and sines of contiguous u32 `positions` times contiguous f32
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
        // SAFETY: the results have an element for each position and frequency, and the blocks
        // cover them.
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
