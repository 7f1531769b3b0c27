//! The CUDA path of [`add_bias`](crate::add_bias()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Result, Storage, Tensor, bail};

use crate::cuda::in_place::write;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Pairs per launch, as in the kernel.
const PAIRS: usize = 3;
/// Rows per block, a warp each, as in the kernel.
const ROWS: usize = 8;
/// Row bytes per warp, as in the kernel: 4 packs of 16 bytes per thread.
const BYTES: usize = 4 * 32 * 16;
/// Maximum grid size in y.
const MAX_SLICES: usize = 65_535;
/// Warps per block in the row sum, as in the kernel.
const SUM_WARPS: u32 = 32;

/// Returns `x + bias` for contiguous pairs `x` `[N, C]` and `bias` `[C]`, with equal N and dtype.
pub(crate) fn forward(pairs: &[(Tensor, Tensor)]) -> Result<Vec<Tensor>> {
    let results = pairs.chunks(PAIRS).map(forward_once);
    Ok(results.collect::<Result<Vec<_>>>()?.concat())
}

/// Like [`forward`], for 1 to [`PAIRS`] pairs.
fn forward_once(pairs: &[(Tensor, Tensor)]) -> Result<Vec<Tensor>> {
    let (first, _) = &pairs[0];
    let device = first.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let n = first.dim(0)?;
    let columns: Vec<usize> = pairs.iter().map(|(_, bias)| bias.elem_count()).collect();
    let widest = columns.iter().copied().max().unwrap_or(0);
    let slices = (widest * first.dtype().size_in_bytes()).div_ceil(BYTES);
    if n > i32::MAX as usize || slices > MAX_SLICES {
        bail!("x: {n} rows of at most {widest} columns, more than one launch takes");
    }
    let held: Vec<_> = pairs
        .iter()
        .map(|(x, bias)| (x.storage_and_layout(), bias.storage_and_layout()))
        .collect();
    let Storage::Cuda(storage) = &*held[0].0.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let results: Vec<CudaStorage> = with_cuda_floats!(storage, "x", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut results = columns
            .iter()
            .map(|columns| unsafe { alloc::<T>(device, n * columns) })
            .collect::<Result<Vec<_>>>()?;
        if n > 0 {
            let by_rows = LaunchConfig {
                grid_dim: (n.div_ceil(ROWS) as u32, slices as u32, pairs.len() as u32),
                block_dim: (32, ROWS as u32, 1),
                shared_mem_bytes: 0,
            };
            let x = |index| In::<T>::optional(held.get(index).map(|(x, _)| x), &stream);
            let bias = |index| In::<T>::optional(held.get(index).map(|(_, bias)| bias), &stream);
            let width = |index| columns.get(index).map_or(0, |&columns| columns as u32);
            let mut results = results.iter_mut().map(|y| Out::new(y, &stream));
            let mut y = || results.next().unwrap_or_else(Out::null);
            // SAFETY: x and y have n * columns elements, bias has columns. An absent pair has no
            // blocks.
            #[allow(unsafe_code)]
            unsafe {
                kernels::add_bias::<T> {
                    x0: x(0)?,
                    x1: x(1)?,
                    x2: x(2)?,
                    bias0: bias(0)?,
                    bias1: bias(1)?,
                    bias2: bias(2)?,
                    y0: y(),
                    y1: y(),
                    y2: y(),
                    n: n as u32,
                    columns0: width(0),
                    columns1: width(1),
                    columns2: width(2),
                }
                .launch(device, by_rows)?;
            }
        }
        results
            .into_iter()
            .map(|y| CudaStorage::wrap_cuda_slice(y, device.clone()))
            .collect()
    });
    let tensors = results.into_iter().zip(pairs);
    Ok(tensors.map(|(y, (x, _))| as_tensor(y, x.shape())).collect())
}

/// Adds the row sum of a contiguous, nonempty `gradient` `[N, C]` to `sum`, contiguous f32 `[C]`.
pub(crate) fn add_gradient(sum: &Tensor, gradient: &Tensor) -> Result<()> {
    let device = sum.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, columns) = gradient.dims2()?;
    if columns > i32::MAX as usize {
        bail!("gradient: {columns} columns, must be below 2^31 on CUDA");
    }
    let mut by_columns = grid(columns.div_ceil(32), 32)?;
    by_columns.block_dim.1 = SUM_WARPS;
    let gradient = gradient.storage_and_layout();
    let Storage::Cuda(storage) = &*gradient.0 else {
        bail!("gradient: on the CPU, must be on a GPU");
    };
    write(sum, |sum, layout| {
        with_cuda_floats!(storage, "gradient", T => {
            let sum = Out::<f32>::in_place(sum, layout, &stream)?;
            // SAFETY: gradient has n * columns elements, sum has columns.
            #[allow(unsafe_code)]
            unsafe {
                kernels::add_bias_gradient::<T> {
                    gradient: In::from_tensor(&gradient, &stream)?,
                    sum,
                    n: n as u64,
                    columns: columns as i32,
                }
                .launch(device, by_columns)?;
            }
        });
        Ok(())
    })
}
