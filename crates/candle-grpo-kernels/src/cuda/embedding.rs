//! The CUDA path of [`embedding`](crate::embedding()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Layout, Result, Shape, Storage, Tensor, bail};

use super::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::embedding::Embedding;

/// Threads of a block, as in the kernels: 8 warps, with one row of the result each.
const THREADS: u32 = 256;
const ROWS: usize = 8;

/// Returns the rows of a contiguous `weight` `[V, H]` at the ids.
pub(crate) fn forward(
    weight: &CudaStorage,
    layout: &Layout,
    op: &Embedding,
) -> Result<(CudaStorage, Shape)> {
    let device = weight.device();
    let stream = device.cuda_stream();
    let (vocab, width) = layout.shape().dims2()?;
    let n = op.ids.elem_count();
    check(n, vocab, width)?;
    let ids = op.ids.storage_and_layout();
    let rows = with_cuda_floats!(weight, "weight", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut rows = unsafe { alloc::<T>(device, n * width)? };
        if n > 0 {
            let mut by_rows = grid(n.div_ceil(ROWS), THREADS)?;
            by_rows.block_dim = (32, ROWS as u32, 1);
            // SAFETY: weight has vocab * width elements, ids n, rows n * width.
            #[allow(unsafe_code)]
            unsafe {
                kernels::embedding_forward::<T> { weight: In::new(weight, layout, &stream)?, ids: In::from_tensor(&ids, &stream)?, rows: Out::new(&mut rows, &stream), n: n as u64, vocab: vocab as u32, width: width as i32 }.launch(device, by_rows)?;
            }
        }
        CudaStorage::wrap_cuda_slice(rows, device.clone())
    });
    Ok((rows, Shape::from(op.shape.as_slice())))
}

/// Returns the gradient of `weight` `[V, H]`. `gradient` is contiguous, `[.., H]` for `ids` `[N]`.
pub(crate) fn backward(weight: &Tensor, ids: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let device = weight.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (vocab, width) = weight.dims2()?;
    let n = ids.elem_count();
    check(n, vocab, width)?;
    let ids = ids.storage_and_layout();
    let gradient = gradient.storage_and_layout();
    let Storage::Cuda(gradient_cuda) = &*gradient.0 else {
        bail!("embedding: the gradient left the GPU");
    };
    let dweight = with_cuda_floats!(gradient_cuda, "gradient", T => {
        let mut dweight = device.alloc_zeros::<T>(vocab * width)?;
        if n > 0 {
            let mut first = device.alloc_zeros::<u32>(vocab)?;
            // 64 packs of 16 bytes of columns for each block in y.
            let slices = (width * size_of::<T>()).div_ceil(64 * 16);
            if slices > 65_535 {
                bail!("weight: rows of {width}, wider than one launch takes");
            }
            let by_places = LaunchConfig {
                grid_dim: (n as u32, slices as u32, 1),
                block_dim: (THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: ids has n elements, first vocab, gradient n * width, dweight vocab * width.
            #[allow(unsafe_code)]
            unsafe {
                kernels::embedding_first { ids: In::from_tensor(&ids, &stream)?, first: Out::new(&mut first, &stream), n: n as u32, vocab: vocab as u32 }.launch(device, grid(n.div_ceil(THREADS as usize), THREADS)?)?;
                let first = CudaStorage::wrap_cuda_slice(first, device.clone());
                kernels::embedding_backward::<T> { gradient: In::from_tensor(&gradient, &stream)?, ids: In::from_tensor(&ids, &stream)?, first: In::new(&first, &Layout::contiguous(vocab), &stream)?, dweight: Out::new(&mut dweight, &stream), n: n as u32, vocab: vocab as u32, width: width as i32 }.launch(device, by_places)?;
            }
        }
        CudaStorage::wrap_cuda_slice(dweight, device.clone())
    });
    Ok(as_tensor(dweight, weight.shape()))
}

/// The kernels count ids, rows of the weight and columns in 31 bits.
fn check(n: usize, vocab: usize, width: usize) -> Result<()> {
    if n.max(vocab).max(width) > i32::MAX as usize {
        bail!("embedding: {n} ids of {vocab} rows of {width}, must be below 2^31 each on CUDA");
    }
    Ok(())
}
