//! The CUDA path of [`squared_gradient_norms`](crate::squared_gradient_norms) and
//! [`scale_gradients`](crate::scale_gradients).

use candle_core::{CudaStorage, Layout, Result, Shape, Storage, Tensor, bail};

use super::in_place::write;
use super::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads of a block and partial sums of one gradient, as in the kernels.
const THREADS: u32 = 256;
const PARTS: usize = 256;

/// Minimum bytes of a block, so that a small gradient has few blocks.
const BYTES_OF_BLOCK: usize = THREADS as usize * 16 * 4;

/// Returns the sum of squares of each of at least one gradient, f64 `[n]`.
pub(crate) fn squared_norms(gradients: &[&Tensor]) -> Result<Tensor> {
    let device = gradients[0].device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let count = gradients.len();
    let mut parts = device.alloc_zeros::<f64>(count * PARTS)?;
    for (index, gradient) in gradients.iter().enumerate() {
        let n = gradient.elem_count();
        if n == 0 {
            continue;
        }
        let gradient = gradient.contiguous()?;
        let gradient = gradient.storage_and_layout();
        let Storage::Cuda(storage) = &*gradient.0 else {
            bail!("gradients: one is not on the GPU");
        };
        let mut own_parts = parts.slice_mut(index * PARTS..(index + 1) * PARTS);
        with_cuda_floats!(storage, "gradients", T => {
            let blocks = (n * size_of::<T>()).div_ceil(BYTES_OF_BLOCK).min(PARTS);
            // SAFETY: the gradient has n elements. There are at most PARTS blocks with one part
            // each.
            #[allow(unsafe_code)]
            unsafe {
                kernels::gradient_squares::<T> { gradient: In::from_tensor(&gradient, &stream)?, parts: Out::new(&mut own_parts, &stream), n: n as u64 }.launch(device, grid(blocks, THREADS)?)?;
            }
        });
    }
    // SAFETY: the kernel writes every element, from PARTS parts of each gradient.
    #[allow(unsafe_code)]
    let sums = unsafe {
        let mut sums = alloc::<f64>(device, count)?;
        let parts = CudaStorage::wrap_cuda_slice(parts, device.clone());
        kernels::gradient_sum_parts {
            parts: In::new(&parts, &Layout::contiguous(count * PARTS), &stream)?,
            sums: Out::new(&mut sums, &stream),
        }
        .launch(device, grid(count, THREADS)?)?;
        sums
    };
    let sums = CudaStorage::wrap_cuda_slice(sums, device.clone());
    Ok(as_tensor(sums, &Shape::from(count)))
}

/// Multiplies a contiguous gradient by `factor`.
pub(crate) fn scale(gradient: &Tensor, factor: f32) -> Result<()> {
    let n = gradient.elem_count();
    if n == 0 {
        return Ok(());
    }
    write(gradient, |storage, layout| {
        let device = storage.device.clone();
        let stream = device.cuda_stream();
        with_cuda_floats!(&*storage, "gradients", T => {
            let gradient = Out::in_place(storage, layout, &stream)?;
            let blocks = (n * size_of::<T>()).div_ceil(THREADS as usize * 16);
            // SAFETY: the gradient has n elements, and the blocks cover them.
            #[allow(unsafe_code)]
            unsafe { kernels::gradient_scale::<T> { gradient, n: n as u64, factor }.launch(&device, grid(blocks, THREADS)?) }
        })
    })
}
