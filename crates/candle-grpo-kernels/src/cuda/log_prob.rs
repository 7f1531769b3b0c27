//! The CUDA path of [`log_prob`](crate::log_prob).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{
    DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, WrapErr};
use candle_core::{Layout, Result, Shape};

use super::{CudaElement, ptx, tensor, with_cuda_floats};
use crate::log_prob::{Backward, Rows};

const BLOCK: (u32, u32, u32) = (512, 1, 1);

/// Logits `[N, V]` to log-probs, entropy and log-sum-exp, `[3, N]`.
pub(crate) fn forward(
    storage: &CudaStorage,
    layout: &Layout,
    rows: &Rows,
) -> Result<(CudaStorage, Shape)> {
    let packed = with_cuda_floats!(storage, "logits", T => forward_of::<T>(storage, layout, rows)?);
    Ok((packed, Shape::from((3, layout.dims()[0]))))
}

fn forward_of<T: CudaElement>(
    storage: &CudaStorage,
    layout: &Layout,
    rows: &Rows,
) -> Result<CudaStorage> {
    let device = storage.device();
    let (n, vocab) = layout.shape().dims2()?;
    // SAFETY: the kernel writes all of it.
    #[allow(unsafe_code)]
    let mut packed = unsafe { device.alloc::<f32>(3 * n)? };
    if n == 0 {
        return Ok(CudaStorage::wrap_cuda_slice(packed, device.clone()));
    }
    let logits = storage.as_cuda_slice::<T>()?.slice(tensor::range(layout)?);
    let kernel = tensor::kernel::<T>(device, "log_prob", ptx::LOG_PROB, "log_prob_forward")?;
    let grid_dim = tensor::grid(n)?;
    tensor::read::<u32, _>(&rows.targets, |targets| {
        tensor::read_optional::<u8, _>(rows.mask.as_ref(), |mask| {
            let (n, vocab, null) = (n as u64, vocab as u64, 0u64);
            let mut launch = kernel.builder();
            launch.arg(&logits).arg(&targets);
            match &mask {
                Some(mask) => launch.arg(mask),
                None => launch.arg(&null),
            };
            launch
                .arg(&mut packed)
                .arg(&n)
                .arg(&vocab)
                .arg(&rows.inverse_temperature);
            let config = LaunchConfig {
                grid_dim,
                block_dim: BLOCK,
                shared_mem_bytes: 0,
            };
            // SAFETY: order and types of the arguments are those of log_prob_forward; targets and mask have n
            // elements, logits n * vocab, packed 3 * n.
            #[allow(unsafe_code)]
            unsafe { launch.launch(config) }.w()?;
            Ok(())
        })
    })?;
    Ok(CudaStorage::wrap_cuda_slice(packed, device.clone()))
}

/// Logits `[N, V]` to their gradient.
pub(crate) fn backward(
    storage: &CudaStorage,
    layout: &Layout,
    pass: &Backward,
) -> Result<(CudaStorage, Shape)> {
    let device = storage.device();
    let gradient = with_cuda_floats!(storage, "logits", T => {
        // SAFETY: the kernel writes all of it.
        #[allow(unsafe_code)]
        let mut gradient = unsafe { device.alloc::<T>(layout.shape().elem_count())? };
        let logits = storage.as_cuda_slice::<T>()?.slice(tensor::range(layout)?);
        let stream = device.cuda_stream();
        let (logits, _reading) = logits.device_ptr(&stream);
        let (pointer, writing) = gradient.device_ptr_mut(&stream);
        launch_backward::<T>(device, layout, pass, logits, pointer)?;
        drop(writing);
        CudaStorage::wrap_cuda_slice(gradient, device.clone())
    });
    Ok((gradient, layout.shape().clone()))
}

/// Logits `[N, V]` become their gradient.
pub(crate) fn backward_in_place(
    storage: &mut CudaStorage,
    layout: &Layout,
    pass: &Backward,
) -> Result<()> {
    let device = storage.device().clone();
    let range = tensor::range(layout)?;
    with_cuda_floats!(&*storage, "logits", T => {
        let mut logits = storage.as_cuda_slice_mut::<T>()?.slice_mut(range);
        let stream = device.cuda_stream();
        let (pointer, _writing) = logits.device_ptr_mut(&stream);
        launch_backward::<T>(&device, layout, pass, pointer, pointer)
    })
}

/// `logits` and `gradient` point to N * V elements of T; they may be the same.
fn launch_backward<T: CudaElement>(
    device: &CudaDevice,
    layout: &Layout,
    pass: &Backward,
    logits: CUdeviceptr,
    gradient: CUdeviceptr,
) -> Result<()> {
    let (n, vocab) = layout.shape().dims2()?;
    if n == 0 {
        return Ok(());
    }
    let kernel = tensor::kernel::<T>(device, "log_prob", ptx::LOG_PROB, "log_prob_backward")?;
    let config = LaunchConfig {
        grid_dim: tensor::grid(n)?,
        block_dim: BLOCK,
        shared_mem_bytes: 0,
    };
    let rows = pass.rows;
    tensor::read::<u32, _>(&rows.targets, |targets| {
        tensor::read_optional::<u8, _>(rows.mask.as_ref(), |mask| {
            tensor::read::<f32, _>(&pass.packed, |packed| {
                tensor::read::<f32, _>(&pass.gradient, |packed_gradient| {
                    let (n, vocab, null) = (n as u64, vocab as u64, 0u64);
                    let mut launch = kernel.builder();
                    launch.arg(&logits).arg(&targets);
                    match &mask {
                        Some(mask) => launch.arg(mask),
                        None => launch.arg(&null),
                    };
                    launch.arg(&packed).arg(&packed_gradient).arg(&gradient);
                    launch.arg(&n).arg(&vocab).arg(&rows.inverse_temperature);
                    // SAFETY: order and types of the arguments are those of log_prob_backward; targets and mask have
                    // n elements, logits and gradient n * vocab, packed and its gradient 3 * n.
                    #[allow(unsafe_code)]
                    unsafe { launch.launch(config) }.w()?;
                    Ok(())
                })
            })
        })
    })
}
