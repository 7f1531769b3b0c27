//! The CUDA path of [`add`](crate::add()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Layout, Result, Shape};

use crate::cuda::elements::blocks;
use crate::cuda::{In, Out, alloc, kernels, with_cuda_floats};

/// Returns the sum of contiguous `a` and `b` with equal shapes.
pub(crate) fn forward(
    (a, a_layout): (&CudaStorage, &Layout),
    (b, b_layout): (&CudaStorage, &Layout),
) -> Result<(CudaStorage, Shape)> {
    let device = a.device();
    let stream = device.cuda_stream();
    let n = a_layout.shape().elem_count();
    let sum = with_cuda_floats!(a, "a", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut sum = unsafe { alloc::<T>(device, n)? };
        if n > 0 {
            // SAFETY: all three have n elements, and the blocks cover them.
            #[allow(unsafe_code)]
            unsafe {
                kernels::add_forward::<T> {
                    a: In::new(a, a_layout, &stream)?,
                    b: In::new(b, b_layout, &stream)?,
                    sum: Out::new(&mut sum, &stream),
                    n: n as u64,
                }
                .launch(device, blocks::<T>(n)?)?;
            }
        }
        CudaStorage::wrap_cuda_slice(sum, device.clone())
    });
    Ok((sum, a_layout.shape().clone()))
}
