//! The CUDA path of [`rope`](crate::rope()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{D, Layout, Result, Shape, Storage, Tensor, bail};

use super::Rope;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads per block, as in the kernel.
const THREADS: u32 = 256;

/// Rotates contiguous queries `[.., heads * D]`, and keys with the same leading dimensions. Without
/// keys, the second result is empty.
pub(crate) fn rotate(
    (query, query_layout): (&CudaStorage, &Layout),
    key: Option<(&CudaStorage, &Layout)>,
    op: &Rope,
) -> Result<[CudaStorage; 2]> {
    let device = query.device();
    let stream = device.cuda_stream();
    let pairs = op.cos.dim(D::Minus1)?;
    let n = op.cos.elem_count() / pairs;
    let heads = |layout: &Layout| layout.dims().last().map_or(0, |width| width / (2 * pairs));
    let (heads, kv_heads) = (
        heads(query_layout),
        key.map_or(0, |(_, layout)| heads(layout)),
    );
    let all_heads = n * (heads + kv_heads);
    let cos = op.cos.storage_and_layout();
    let sin = op.sin.storage_and_layout();
    Ok(with_cuda_floats!(query, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let (mut rotated_query, mut rotated_key) = unsafe {
            (alloc::<T>(device, n * heads * 2 * pairs)?, alloc::<T>(device, n * kv_heads * 2 * pairs)?)
        };
        if all_heads > 0 {
            // One thread per 16 bytes in half a head, up to a warp.
            let threads = (pairs * size_of::<T>()).div_ceil(16).clamp(1, 32) as u32;
            let per_block = THREADS / threads;
            // A head's index exceeds the last one by less than a block.
            if all_heads > (u32::MAX - THREADS) as usize || all_heads.div_ceil(per_block as usize) > i32::MAX as usize {
                bail!("x: shape {:?}, has more heads than one launch takes", query_layout.dims());
            }
            let grid = LaunchConfig {
                grid_dim: (all_heads.div_ceil(per_block as usize) as u32, 1, 1),
                block_dim: (threads, per_block, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: queries and keys have n * heads and n * kv_heads heads with 2 * pairs
            // elements, cos and sin n * pairs.
            #[allow(unsafe_code)]
            unsafe {
                kernels::rope::<T> {
                    query: In::new(query, query_layout, &stream)?,
                    key: key.map_or(Ok(In::null()), |(key, layout)| In::new(key, layout, &stream))?,
                    cos: In::from_tensor(&cos, &stream)?,
                    sin: In::from_tensor(&sin, &stream)?,
                    rotated_query: Out::new(&mut rotated_query, &stream),
                    rotated_key: Out::new(&mut rotated_key, &stream),
                    n: n as u32,
                    heads: heads as u32,
                    kv_heads: kv_heads as u32,
                    pairs: pairs as i32,
                    sign: if op.back { -1.0 } else { 1.0 },
                }
                .launch(device, grid)?;
            }
        }
        [
            CudaStorage::wrap_cuda_slice(rotated_query, device.clone()),
            CudaStorage::wrap_cuda_slice(rotated_key, device.clone()),
        ]
    }))
}

/// Rotates contiguous queries and keys with the same dtype. Returns tensors without a graph.
pub(crate) fn rotate_both(query: &Tensor, key: &Tensor, op: &Rope) -> Result<[Tensor; 2]> {
    let (queries, keys) = (query.storage_and_layout(), key.storage_and_layout());
    let (Storage::Cuda(query_cuda), Storage::Cuda(key_cuda)) = (&*queries.0, &*keys.0) else {
        bail!("rope: x left the GPU");
    };
    let [rotated_query, rotated_key] =
        rotate((query_cuda, queries.1), Some((key_cuda, keys.1)), op)?;
    Ok([
        as_tensor(rotated_query, query.shape()),
        as_tensor(rotated_key, key.shape()),
    ])
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
