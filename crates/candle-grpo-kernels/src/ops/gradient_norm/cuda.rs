//! The CUDA path of [`squared_gradient_norms`](crate::squared_gradient_norms) and
//! [`scale_gradients`](crate::scale_gradients).

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};

use crate::cuda::tensor_list::{TensorList, address, dtype_number, word};
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels};

/// Threads per block and partial sums per gradient, as in the kernels.
const THREADS: u32 = 256;
const PARTS: usize = 256;

/// Bytes that a block's threads process at once.
const BYTES_OF_BLOCK: usize = THREADS as usize * 16;

/// Returns each gradient's sum of squares, f64 `[n]`, for at least one gradient.
pub(crate) fn squared_norms(gradients: &[&Tensor]) -> Result<Tensor> {
    let device = gradients[0].device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let gradients = gradients
        .iter()
        .map(|gradient| gradient.contiguous())
        .collect::<Result<Vec<_>>>()?;
    let list = list(&gradients, &stream, |bytes| {
        // A small gradient takes few blocks.
        bytes.div_ceil(4 * BYTES_OF_BLOCK).clamp(1, PARTS)
    })?;
    let (blocks, rows) = (list.blocks, list.rows);
    let list = list.upload(device)?;
    // SAFETY: each gradient has n elements and at most PARTS blocks, each of which writes a part.
    // The second kernel writes every sum.
    #[allow(unsafe_code)]
    let sums = unsafe {
        let mut parts = alloc::<f64>(device, blocks)?;
        kernels::gradient_squares {
            list: In::from_slice(&list, &stream),
            count: rows,
            parts: Out::new(&mut parts, &stream),
        }
        .launch(device, grid(blocks, THREADS)?)?;
        let mut sums = alloc::<f64>(device, rows as usize)?;
        let parts = CudaStorage::wrap_cuda_slice(parts, device.clone());
        kernels::gradient_sum_parts {
            list: In::from_slice(&list, &stream),
            parts: In::new(&parts, &Layout::contiguous(blocks), &stream)?,
            sums: Out::new(&mut sums, &stream),
        }
        .launch(device, grid(rows as usize, THREADS)?)?;
        sums
    };
    let sums = CudaStorage::wrap_cuda_slice(sums, device.clone());
    Ok(as_tensor(sums, &Shape::from(rows as usize)))
}

/// Multiplies contiguous, nonempty gradients by `factor`.
pub(crate) fn scale(gradients: &[&Tensor], factor: f32) -> Result<()> {
    let Some(first) = gradients.first() else {
        return Ok(());
    };
    let device = first.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let list = list(gradients, &stream, |bytes| bytes.div_ceil(BYTES_OF_BLOCK))?;
    let (blocks, count) = (grid(list.blocks, THREADS)?, list.rows);
    let list = list.upload(device)?;
    // SAFETY: each gradient has n elements, the blocks cover them, and gradients share no memory.
    #[allow(unsafe_code)]
    unsafe {
        kernels::gradient_scale {
            list: In::from_slice(&list, &stream),
            count,
            factor,
        }
        .launch(device, blocks)
    }
}

/// Returns the list for the kernels. `blocks` returns the number of blocks from a gradient's size
/// in bytes.
fn list(
    gradients: &[impl AsRef<Tensor>],
    stream: &CudaStream,
    blocks: impl Fn(usize) -> usize,
) -> Result<TensorList> {
    let mut list = TensorList::default();
    for gradient in gradients {
        let gradient = gradient.as_ref();
        let (n, dtype) = (gradient.elem_count(), gradient.dtype());
        let address = address(gradient, stream)?;
        let blocks = blocks(n * dtype.size_in_bytes());
        let dtype = word(dtype_number(dtype)?, 0);
        list.push(blocks, |first_block| {
            [address, n as u64, word(first_block, blocks as u32), dtype]
        })?;
    }
    Ok(list)
}
