//! The CUDA path of [`route`](crate::route()).

use candle_core::{CudaStorage, Result, Shape, Storage, Tensor, bail};

use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Rows per block, and threads, as in the kernel.
const WARPS: usize = 4;
const THREADS: u32 = 32 * WARPS as u32;

/// Returns the experts and their gates for contiguous `logits` `[N, E]`, which are not empty.
pub(crate) fn forward(logits: &Tensor, top_k: usize, normalize: bool) -> Result<(Tensor, Tensor)> {
    let (n, experts) = logits.dims2()?;
    if n > i32::MAX as usize || experts > i32::MAX as usize {
        bail!(
            "logits: shape {:?}, more than one launch takes",
            logits.dims()
        );
    }
    let device = logits.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let (mut chosen, mut gates) = unsafe {
        (
            alloc::<u32>(device, n * top_k)?,
            alloc::<f32>(device, n * top_k)?,
        )
    };
    let storage = logits.storage_and_layout();
    let Storage::Cuda(cuda) = &*storage.0 else {
        bail!("logits: on the CPU, must be on a GPU");
    };
    with_cuda_floats!(cuda, "logits", T => {
        // SAFETY: the sizes match the tensors, and the warps cover the rows. `top_k` is at most the
        // number of experts.
        #[allow(unsafe_code)]
        unsafe {
            kernels::route::<T> {
                logits: In::from_tensor(&storage, &stream)?,
                chosen: Out::new(&mut chosen, &stream),
                gates: Out::new(&mut gates, &stream),
                n: n as u32,
                experts: experts as u32,
                top_k: top_k as u32,
                normalize: u32::from(normalize),
            }
            .launch(device, grid(n.div_ceil(WARPS), THREADS)?)?;
        }
    });
    let shape = Shape::from((n, top_k));
    let chosen = CudaStorage::wrap_cuda_slice(chosen, device.clone());
    let gates = CudaStorage::wrap_cuda_slice(gates, device.clone());
    Ok((as_tensor(chosen, &shape), as_tensor(gates, &shape)))
}
