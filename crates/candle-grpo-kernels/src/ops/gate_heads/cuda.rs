//! The CUDA path of [`gate_heads`](crate::gate_heads()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::{Result, Storage, Tensor, bail};

use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads per block, as in the kernel.
const THREADS: u32 = 256;
/// Maximum number of blocks, which loop over further elements.
const MAX_BLOCKS: usize = 1 << 16;

/// Returns the result for contiguous arguments.
pub(crate) fn gate(x: &Tensor, query: &Tensor, head_dim: usize) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let elements = x.elem_count();
    if head_dim > i32::MAX as usize {
        bail!("head_dim: {head_dim}, must be below 2^31 on CUDA");
    }
    let (x_storage, query_storage) = (x.storage_and_layout(), query.storage_and_layout());
    let Storage::Cuda(cuda_x) = &*x_storage.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let y = with_cuda_floats!(cuda_x, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, elements)? };
        if elements > 0 {
            let per_block = THREADS as usize * 16 / size_of::<T>();
            let blocks = grid(elements.div_ceil(per_block).min(MAX_BLOCKS), THREADS)?;
            // SAFETY: x and y have n * head_dim elements, the query twice as many.
            #[allow(unsafe_code)]
            unsafe {
                kernels::gate_heads::<T> {
                    x: In::from_tensor(&x_storage, &stream)?,
                    query: In::from_tensor(&query_storage, &stream)?,
                    y: Out::new(&mut y, &stream),
                    n: (elements / head_dim) as u64,
                    head_dim: head_dim as i32,
                }
                .launch(device, blocks)?;
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok(as_tensor(y, x.shape()))
}
