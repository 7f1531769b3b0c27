//! The CUDA path of [`embedding`](crate::embedding()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Layout, Result, Shape, Storage, Tensor, bail};

use super::Embedding;
use crate::cuda::in_place::write;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads per block, as in the kernels: 8 warps, each with one result row.
const THREADS: u32 = 256;
const ROWS: usize = 8;
/// Threads in the single block that sorts ids.
const SORT_THREADS: u32 = 1024;

/// Returns the rows at the ids in a contiguous `weight` `[V, H]`.
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

/// For each of N result rows, sums the rows of a contiguous `x` `[.., H]` at
/// `positions[starts[row]..starts[row + 1]]`. `starts` has N + 1 entries.
pub(crate) fn sum(x: &Tensor, positions: &Tensor, starts: &Tensor) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, width) = (starts.elem_count() - 1, x.dim(1)?);
    check(n, positions.elem_count(), width)?;
    let (x, positions) = (x.storage_and_layout(), positions.storage_and_layout());
    let starts = starts.storage_and_layout();
    let Storage::Cuda(storage) = &*x.0 else {
        bail!("gradient: on the CPU, must be on a GPU");
    };
    let mut by_rows = grid(n.div_ceil(ROWS), THREADS)?;
    by_rows.block_dim = (32, ROWS as u32, 1);
    let sums = with_cuda_floats!(storage, "gradient", T => {
        // SAFETY: the kernel writes every element in the sums, n * width. All positions are rows in
        // x.
        #[allow(unsafe_code)]
        let sums = unsafe {
            let mut sums = alloc::<T>(device, n * width)?;
            kernels::embedding_sum::<T> {
                x: In::from_tensor(&x, &stream)?,
                starts: In::from_tensor(&starts, &stream)?,
                positions: In::from_tensor(&positions, &stream)?,
                sums: Out::new(&mut sums, &stream),
                n: n as u64,
                width: width as i32,
            }
            .launch(device, by_rows)?;
            sums
        };
        CudaStorage::wrap_cuda_slice(sums, device.clone())
    });
    Ok(as_tensor(sums, &Shape::from((n, width))))
}

/// Adds the rows in a contiguous `gradient` `[.., H]` to the rows at `ids` `[N]` in `sum`,
/// contiguous f32 `[V, H]`. None of them may be empty.
pub(crate) fn add(sum: &Tensor, ids: &Tensor, gradient: &Tensor) -> Result<()> {
    let device = sum.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (vocab, width) = sum.dims2()?;
    let n = ids.elem_count();
    check(n, vocab, width)?;
    // 64 packs of 16 bytes of columns for each block in y.
    let slices = (width * gradient.dtype().size_in_bytes()).div_ceil(64 * 16);
    if slices > 65_535 {
        bail!("sum: rows of {width}, wider than one launch takes");
    }
    let ids = ids.storage_and_layout();
    let gradient = gradient.storage_and_layout();
    let Storage::Cuda(gradient_cuda) = &*gradient.0 else {
        bail!("gradient: on the CPU, must be on a GPU");
    };
    let mut counts = device.alloc_zeros::<u32>(vocab)?;
    // SAFETY: the kernel writes all starts and ranks, and reads the positions that it has written.
    #[allow(unsafe_code)]
    let (mut starts, mut ranks, mut positions) = unsafe {
        (
            alloc::<u32>(device, vocab + 1)?,
            alloc::<u32>(device, n)?,
            alloc::<u32>(device, n)?,
        )
    };
    // SAFETY: ids, ranks and positions have n elements, counts vocab, starts vocab + 1.
    #[allow(unsafe_code)]
    unsafe {
        kernels::embedding_sort {
            ids: In::from_tensor(&ids, &stream)?,
            counts: Out::new(&mut counts, &stream),
            starts: Out::new(&mut starts, &stream),
            ranks: Out::new(&mut ranks, &stream),
            positions: Out::new(&mut positions, &stream),
            n: n as u32,
            vocab: vocab as u32,
        }
        .launch(device, grid(1, SORT_THREADS)?)?;
    }
    let starts = CudaStorage::wrap_cuda_slice(starts, device.clone());
    let positions = CudaStorage::wrap_cuda_slice(positions, device.clone());
    let by_positions = LaunchConfig {
        grid_dim: (n as u32, slices as u32, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    write(sum, |sum, layout| {
        with_cuda_floats!(gradient_cuda, "gradient", T => {
            let sum = Out::<f32>::in_place(sum, layout, &stream)?;
            // SAFETY: gradient has n * width elements, ids and positions n, starts vocab + 1, sum
            // vocab * width.
            #[allow(unsafe_code)]
            unsafe {
                kernels::embedding_add::<T> { gradient: In::from_tensor(&gradient, &stream)?, ids: In::from_tensor(&ids, &stream)?, starts: In::new(&starts, &Layout::contiguous(vocab + 1), &stream)?, positions: In::new(&positions, &Layout::contiguous(n), &stream)?, sum, vocab: vocab as u32, width: width as i32 }.launch(device, by_positions)?;
            }
        });
        Ok(())
    })
}

/// Checks that ids, weight rows and columns fit in 31 bits, in which the kernels count them.
fn check(n: usize, vocab: usize, width: usize) -> Result<()> {
    if n.max(vocab).max(width) > i32::MAX as usize {
        bail!("embedding: {n} ids of {vocab} rows of {width}, must be below 2^31 each on CUDA");
    }
    Ok(())
}
