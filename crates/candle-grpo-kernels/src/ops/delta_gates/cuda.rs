//! The CUDA path of [`delta_gates`](crate::delta_gates()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Result, Storage, Tensor, bail};

use crate::cuda::column_sums::column_sums;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads per block in the forward pass, as in the kernel.
const THREADS: u32 = 256;
/// Rows per block in the backward pass, as in the kernel.
const ROWS: usize = 8;
/// Maximum number of blocks with other rows. The gradients of the vectors are summed over the rows
/// in a block, then over the blocks in order, so they are deterministic.
const MAX_BLOCKS: usize = 512;

/// Returns `g` and `beta` for contiguous inputs `a` and `b` `[N, heads]`, `a_log` and `dt_bias`
/// `[heads]` with one dtype.
pub(crate) fn forward(inputs: [&Tensor; 4]) -> Result<(Tensor, Tensor)> {
    let device = inputs[0].device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, heads) = size(inputs[0])?;
    let [a, b, a_log, dt_bias] = inputs.map(Tensor::storage_and_layout);
    let Storage::Cuda(cuda) = &*a.0 else {
        bail!("a: on the CPU, must be on a GPU");
    };
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let (mut g, mut beta) = unsafe {
        (
            alloc::<f32>(device, n * heads)?,
            alloc::<f32>(device, n * heads)?,
        )
    };
    if n * heads > 0 {
        with_cuda_floats!(cuda, "a", T => {
            // SAFETY: a, b and the results have n * heads elements, the vectors heads.
            #[allow(unsafe_code)]
            unsafe {
                kernels::delta_gates_forward::<T> {
                    a: In::from_tensor(&a, &stream)?,
                    b: In::from_tensor(&b, &stream)?,
                    a_log: In::from_tensor(&a_log, &stream)?,
                    dt_bias: In::from_tensor(&dt_bias, &stream)?,
                    g: Out::new(&mut g, &stream),
                    beta: Out::new(&mut beta, &stream),
                    n: n as u64,
                    heads: heads as u32,
                }
                .launch(device, grid((n * heads).div_ceil(THREADS as usize), THREADS)?)?;
            }
        });
    }
    let tensor = |x| {
        as_tensor(
            CudaStorage::wrap_cuda_slice(x, device.clone()),
            inputs[0].shape(),
        )
    };
    Ok((tensor(g), tensor(beta)))
}

/// Returns the gradients with respect to the arguments to [`forward`], given contiguous f32
/// gradients with respect to its results.
pub(crate) fn backward(inputs: [&Tensor; 4], gradients: [&Tensor; 2]) -> Result<[Tensor; 4]> {
    let device = inputs[0].device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, heads) = size(inputs[0])?;
    let [a, b, a_log, dt_bias] = inputs.map(Tensor::storage_and_layout);
    let [of_g, of_beta] = gradients.map(Tensor::storage_and_layout);
    let Storage::Cuda(cuda) = &*a.0 else {
        bail!("a: on the CPU, must be on a GPU");
    };
    let blocks = n.div_ceil(ROWS).clamp(1, MAX_BLOCKS);
    let columns = 2 * heads;
    let by_rows = LaunchConfig {
        grid_dim: (heads.div_ceil(32) as u32, blocks as u32, 1),
        block_dim: (32, ROWS as u32, 1),
        shared_mem_bytes: 0,
    };
    let (of_a, of_b, sums) = with_cuda_floats!(cuda, "a", T => {
        // SAFETY: the kernel writes every element; without rows, zeros for the parts.
        #[allow(unsafe_code)]
        let (mut of_a, mut of_b, mut partial) = unsafe {(
            alloc::<T>(device, n * heads)?,
            alloc::<T>(device, n * heads)?,
            alloc::<f32>(device, blocks * columns)?,
        )};
        // SAFETY: a, b and their gradients have n * heads elements, the vectors heads, and the
        // partial sums both vectors for each block of rows.
        #[allow(unsafe_code)]
        unsafe {
            kernels::delta_gates_backward::<T> {
                a: In::from_tensor(&a, &stream)?,
                b: In::from_tensor(&b, &stream)?,
                a_log: In::from_tensor(&a_log, &stream)?,
                dt_bias: In::from_tensor(&dt_bias, &stream)?,
                of_g: In::from_tensor(&of_g, &stream)?,
                of_beta: In::from_tensor(&of_beta, &stream)?,
                of_a: Out::new(&mut of_a, &stream),
                of_b: Out::new(&mut of_b, &stream),
                partial: Out::new(&mut partial, &stream),
                n: n as u64,
                heads: heads as u32,
            }
            .launch(device, by_rows)?;
        }
        (
            CudaStorage::wrap_cuda_slice(of_a, device.clone()),
            CudaStorage::wrap_cuda_slice(of_b, device.clone()),
            column_sums::<T>(device, &partial, [blocks, 0], columns)?,
        )
    });
    let sums = sums.get(0)?;
    Ok([
        as_tensor(of_a, inputs[0].shape()),
        as_tensor(of_b, inputs[0].shape()),
        sums.narrow(0, 0, heads)?,
        sums.narrow(0, heads, heads)?,
    ])
}

/// Returns N and heads, which fit the kernels' numbers.
fn size(a: &Tensor) -> Result<(usize, usize)> {
    let (n, heads) = a.dims2()?;
    if heads > i32::MAX as usize / 2 {
        bail!("a: {heads} value heads, must be below 2^30 on CUDA");
    }
    Ok((n, heads))
}
