//! The CUDA path of [`rms_norm`](crate::rms_norm).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Layout, Result, Shape, Storage, Tensor};

use super::RmsNorm;
use crate::cuda::column_sums::column_sums;
use crate::cuda::{In, Out, alloc, as_tensor, kernels, with_cuda_floats};

/// Maximum row width. The sums in the backward pass must fit in 48 KiB of shared memory, next to
/// the kernel's other arrays.
pub(crate) const MAX_WIDTH: usize = (48 << 10) / size_of::<f32>() - 64;

/// Maximum number of blocks. The weight gradient is summed over the rows in a block, then over the
/// blocks in order, so it is deterministic.
const MAX_BLOCKS: usize = 512;

/// Returns the threads per row and the rows per block: part of a warp for a head's row, 256 threads
/// for a wide row.
fn block(width: usize) -> (u32, u32) {
    let threads = match width {
        0..=64 => 8,
        65..=128 => 16,
        129..=1024 => 32,
        1025..=2048 => 64,
        2049..=4096 => 128,
        _ => 256,
    };
    (threads, 256 / threads)
}

/// Up to this many rows, as in decoding, each get their own block, because fewer blocks would leave
/// multiprocessors idle.
const FEW_ROWS: usize = 1024;

/// Returns the launch for a forward pass. A block loops over further rows.
fn by_rows(n: usize, width: usize) -> LaunchConfig {
    let (threads, rows) = match n {
        // Eight 2-byte elements are one access per thread.
        ..=FEW_ROWS => (32 * width.div_ceil(8 * 32).clamp(1, 8) as u32, 1),
        _ => block(width),
    };
    LaunchConfig {
        grid_dim: (n.div_ceil(rows as usize).min(1 << 16) as u32, 1, 1),
        block_dim: (threads, rows, 1),
        shared_mem_bytes: 0,
    }
}

/// Returns the result for contiguous `x` `[.., H]` and `weight` `[H]`.
pub(crate) fn forward(
    x: &CudaStorage,
    x_layout: &Layout,
    weight: &CudaStorage,
    weight_layout: &Layout,
    norm: &RmsNorm,
) -> Result<(CudaStorage, Shape)> {
    let device = x.device();
    let stream = device.cuda_stream();
    let width = weight_layout.shape().elem_count();
    let n = x_layout.shape().elem_count() / width;
    let y = with_cuda_floats!(x, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, n * width)? };
        if n > 0 {
            // SAFETY: x and y have n * width elements, weight width, which fits an i32.
            #[allow(unsafe_code)]
            unsafe {
                kernels::rms_norm_forward::<T> { x: In::new(x, x_layout, &stream)?, weight: In::new(weight, weight_layout, &stream)?, y: Out::new(&mut y, &stream), n: n as u64, width: width as i32, epsilon: norm.options.epsilon as f32, offset: norm.options.offset() }.launch(device, by_rows(n, width))?;
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok((y, x_layout.shape().clone()))
}

/// Returns `x + change` and its norm, for contiguous `x` and `change` `[.., H]` and `weight` `[H]`.
pub(crate) fn add_forward(
    x: &Tensor,
    change: &Tensor,
    weight: &Tensor,
    norm: &RmsNorm,
) -> Result<(Tensor, Tensor)> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (width, elements) = (weight.elem_count(), x.elem_count());
    let n = elements / width;
    let (x_storage, change_storage, weight_storage) = (
        x.storage_and_layout(),
        change.storage_and_layout(),
        weight.storage_and_layout(),
    );
    let Storage::Cuda(x_cuda) = &*x_storage.0 else {
        candle_core::bail!("rms_norm: x left the GPU");
    };
    let (sum, y) = with_cuda_floats!(x_cuda, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let (mut sum, mut y) = unsafe { (alloc::<T>(device, elements)?, alloc::<T>(device, elements)?) };
        if n > 0 {
            // SAFETY: x, change, sum and y have n * width elements, weight width, which fits an
            // i32.
            #[allow(unsafe_code)]
            unsafe {
                kernels::rms_norm_add_forward::<T> { x: In::from_tensor(&x_storage, &stream)?, change: In::from_tensor(&change_storage, &stream)?, weight: In::from_tensor(&weight_storage, &stream)?, sum: Out::new(&mut sum, &stream), y: Out::new(&mut y, &stream), n: n as u64, width: width as i32, epsilon: norm.options.epsilon as f32, offset: norm.options.offset() }.launch(device, by_rows(n, width))?;
            }
        }
        (
            CudaStorage::wrap_cuda_slice(sum, device.clone()),
            CudaStorage::wrap_cuda_slice(y, device.clone()),
        )
    });
    Ok((as_tensor(sum, x.shape()), as_tensor(y, x.shape())))
}

/// Returns the gradients with respect to `x` and `weight`. All are contiguous; the width is at most
/// [`MAX_WIDTH`].
pub(crate) fn backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    norm: &RmsNorm,
) -> Result<(Tensor, Tensor)> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let width = weight.elem_count();
    let n = x.elem_count() / width;
    let (threads, rows) = block(width);
    let blocks = n.div_ceil(rows as usize).clamp(1, MAX_BLOCKS);
    let (x_storage, weight_storage, gradient_storage) = (
        x.storage_and_layout(),
        weight.storage_and_layout(),
        gradient.storage_and_layout(),
    );
    let Storage::Cuda(x_cuda) = &*x_storage.0 else {
        candle_core::bail!("rms_norm: x left the GPU");
    };
    let (dx, dweight) = with_cuda_floats!(x_cuda, "x", T => {
        // SAFETY: the kernel writes every element; without rows, zeros for the parts.
        #[allow(unsafe_code)]
        let (mut dx, mut partial) = unsafe {(
            alloc::<T>(device, n * width)?,
            alloc::<f32>(device, blocks * width)?,
        )};
        let by_rows = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (threads, rows, 1),
            shared_mem_bytes: (rows as usize * width * size_of::<f32>()) as u32,
        };
        // SAFETY: x, gradient and dx have n * width elements, weight width, partial
        // blocks * width. The shared memory has a row of sums per row in a block.
        #[allow(unsafe_code)]
        unsafe {
            kernels::rms_norm_backward::<T> { x: In::from_tensor(&x_storage, &stream)?, weight: In::from_tensor(&weight_storage, &stream)?, gradient: In::from_tensor(&gradient_storage, &stream)?, dx: Out::new(&mut dx, &stream), partial: Out::new(&mut partial, &stream), n: n as u64, width: width as i32, epsilon: norm.options.epsilon as f32, offset: norm.options.offset() }.launch(device, by_rows)?;
        }
        (
            CudaStorage::wrap_cuda_slice(dx, device.clone()),
            column_sums::<T>(device, &partial, [blocks, 0], width)?,
        )
    });
    Ok((as_tensor(dx, x.shape()), dweight.get(0)?))
}
