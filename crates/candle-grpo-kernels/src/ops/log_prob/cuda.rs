//! The CUDA path of [`log_prob`](crate::log_prob).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Layout, Result, Shape, Tensor, bail};

use super::{Backward, Rows, rows_and_width};
use crate::cuda::{CudaElement, In, Out, alloc, grid, kernels, with_cuda_floats};

/// Threads per block, as in the kernels.
pub(crate) const THREADS: u32 = 256;

/// Maps logits `[.., V]` to log-probs, entropy and log-sum-exp, `[3, N]`.
pub(crate) fn forward(
    storage: &CudaStorage,
    layout: &Layout,
    rows: &Rows,
) -> Result<(CudaStorage, Shape)> {
    let (device, (n, _)) = (storage.device(), dims(layout)?);
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let mut packed = unsafe { alloc::<f32>(device, 3 * n)? };
    if n > 0 {
        let stream = device.cuda_stream();
        with_cuda_floats!(storage, "logits", T => launch_forward(
            device,
            layout,
            rows,
            In::<T>::new(storage, layout, &stream)?,
            Out::new(&mut packed, &stream),
        )?);
    }
    let packed = CudaStorage::wrap_cuda_slice(packed, device.clone());
    Ok((packed, Shape::from((3, n))))
}

fn launch_forward<T: CudaElement>(
    device: &CudaDevice,
    layout: &Layout,
    rows: &Rows,
    logits: In<T>,
    packed: Out<f32>,
) -> Result<()> {
    let stream = device.cuda_stream();
    let (n, vocab) = dims(layout)?;
    let targets = rows.targets.storage_and_layout();
    let mask = rows.mask.as_ref().map(Tensor::storage_and_layout);
    // SAFETY: targets and mask have n elements, logits n * vocab, packed 3 * n. There is a block
    // per row.
    #[allow(unsafe_code)]
    unsafe {
        kernels::log_prob_forward::<T> {
            logits,
            targets: In::from_tensor(&targets, &stream)?,
            mask: In::optional(mask.as_ref(), &stream)?,
            packed,
            n: n as u64,
            vocab: vocab as u64,
            inverse_temperature: rows.inverse_temperature,
        }
        .launch(device, grid(n, THREADS)?)
    }
}

/// Maps logits `[.., V]` to their gradient.
pub(crate) fn backward(
    storage: &CudaStorage,
    layout: &Layout,
    pass: &Backward,
) -> Result<(CudaStorage, Shape)> {
    let device = storage.device();
    let stream = device.cuda_stream();
    let gradient = with_cuda_floats!(storage, "logits", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut gradient = unsafe { alloc::<T>(device, layout.shape().elem_count())? };
        let logits = In::<T>::new(storage, layout, &stream)?;
        launch_backward(device, dims(layout)?, pass, logits, Out::new(&mut gradient, &stream))?;
        CudaStorage::wrap_cuda_slice(gradient, device.clone())
    });
    Ok((gradient, layout.shape().clone()))
}

/// Replaces logits `[.., V]` by their gradient.
pub(crate) fn backward_in_place(
    storage: &mut CudaStorage,
    layout: &Layout,
    pass: &Backward,
) -> Result<()> {
    let device = storage.device().clone();
    let stream = device.cuda_stream();
    with_cuda_floats!(&*storage, "logits", T => {
        let gradient = Out::<T>::in_place(storage, layout, &stream)?;
        launch_backward(&device, dims(layout)?, pass, gradient.read(), gradient)
    })
}

/// Maps logits to their gradient, which may share their memory.
fn launch_backward<T: CudaElement>(
    device: &CudaDevice,
    (n, vocab): (usize, usize),
    pass: &Backward,
    logits: In<T>,
    gradient: Out<T>,
) -> Result<()> {
    let stream = device.cuda_stream();
    if n == 0 {
        return Ok(());
    }
    let targets = pass.rows.targets.storage_and_layout();
    let mask = pass.rows.mask.as_ref().map(Tensor::storage_and_layout);
    let packed = pass.packed.storage_and_layout();
    let packed_gradient = pass.gradient.storage_and_layout();
    // SAFETY: targets and mask have n elements, logits and gradient n * vocab, packed and its
    // gradient 3 * n. There is a block per row, and a thread reads an element before it writes it.
    #[allow(unsafe_code)]
    unsafe {
        kernels::log_prob_backward::<T> {
            logits,
            targets: In::from_tensor(&targets, &stream)?,
            mask: In::optional(mask.as_ref(), &stream)?,
            packed: In::from_tensor(&packed, &stream)?,
            packed_gradient: In::from_tensor(&packed_gradient, &stream)?,
            gradient,
            n: n as u64,
            vocab: vocab as u64,
            inverse_temperature: pass.rows.inverse_temperature,
        }
        .launch(device, grid(n, THREADS)?)
    }
}

/// Returns the number of rows and the vocabulary size. The kernels count columns in 31 bits.
fn dims(layout: &Layout) -> Result<(usize, usize)> {
    let (n, vocab) = rows_and_width(layout);
    if vocab > 1 << 30 {
        bail!("logits: a vocabulary of {vocab}, must be at most 2^30 on CUDA");
    }
    Ok((n, vocab))
}
