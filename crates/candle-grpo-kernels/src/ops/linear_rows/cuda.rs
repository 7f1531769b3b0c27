//! The CUDA path of [`linear_rows`](crate::linear_rows()): cuBLAS products, and a kernel for few
//! rows and quantized weights.

use candle_core::cuda_backend::cudarc::driver::{CudaStream, LaunchConfig};
use candle_core::quantized::GgmlDType;
use candle_core::{CudaStorage, DType, Error, Result, Shape, Storage, Tensor, bail};

use crate::blocks::block_type;
use crate::cuda::argument::Argument;
use crate::cuda::matmul::{Batch, Matrix, products};
use crate::cuda::tensor_list::address;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Most rows of `x` that the kernel takes. By arithmetic, on an H200: reading blocks in 4 bits, and
/// writing and reading a bf16 copy, takes 4.56 bytes at 4.3 TB/s for each number. The products of
/// 64 rows take 128 FLOP, which is half as long at the 264 TFLOPS of `mma.sync` in `attention`.
const MAX_ROWS: usize = 64;
/// Rows of `x` in the smaller kernel.
const FEW_ROWS: usize = 16;
/// Weights per launch, threads per block, and weight rows of a block, as in the kernel.
const WEIGHTS: usize = 4;
const THREADS: u32 = 128;
const COLUMNS: usize = 64;
/// A block's warps, the weight rows of a warp, and the depth that it copies at a time.
const WARPS: usize = 4;
const COLUMNS_OF_WARP: usize = 32;
const SEGMENT: usize = 256;
/// Blocks to aim for: two on each multiprocessor of an H200. A constant, so that other GPUs add in
/// the same order.
const BLOCKS: usize = 264;
/// Least number of segments in a block, two for each warp of the same rows.
const SEGMENTS: usize = 4;
/// Most inputs, so that the elements of `x` have 32-bit offsets.
const MAX_INPUTS: usize = 1 << 24;
const THREADS_OF_SUM: u32 = 256;

/// Computes `x w^T` for each weight, in the dtype of `x`.
pub(crate) fn forward(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    let x = x.contiguous()?;
    let (rows, inputs) = x.dims2()?;
    let takes_blocks = rows <= MAX_ROWS && inputs <= MAX_INPUTS;
    let is_for_kernel = |weight: &Tensor| takes_blocks && weight.dtype() == DType::U8;
    let (blocks, others): (Vec<_>, Vec<_>) = weights
        .iter()
        .copied()
        .partition(|weight| is_for_kernel(weight));
    let of_blocks = blocks
        .chunks(WEIGHTS)
        .map(|weights| of_blocks(&x, weights))
        .collect::<Result<Vec<_>>>()?;
    let mut of_blocks = of_blocks.into_iter().flatten();
    let mut of_others = by_cublas(&x, &others)?.into_iter();
    let results = weights.iter().map(|weight| {
        let result = if is_for_kernel(weight) {
            of_blocks.next()
        } else {
            of_others.next()
        };
        result.ok_or_else(|| Error::msg("fewer results than weights"))
    });
    results.collect()
}

/// Computes `x w^T` for 1 to [`WEIGHTS`] quantized weights, in one launch, and one more if blocks
/// divide the depth. The split depends only on the sizes of the weights.
fn of_blocks(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (n, inputs) = x.dims2()?;
    let types = weights.iter().map(|weight| block_type(weight));
    let types = types.collect::<Result<Vec<_>>>()?;
    let outputs = weights.iter().map(|weight| weight.dim(0));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let x = aligned(x, &stream)?;
    let weights = weights.iter().map(|weight| aligned(weight, &stream));
    let weights = weights.collect::<Result<Vec<_>>>()?;

    let of_columns: usize = outputs.iter().map(|rows| rows.div_ceil(COLUMNS)).sum();
    let most = inputs.div_ceil(SEGMENT) / SEGMENTS;
    let of_depth = BLOCKS.div_ceil(of_columns.max(1)).min(most).max(1);
    let len = n * outputs.iter().sum::<usize>();
    if of_columns > i32::MAX as usize {
        bail!("weights: {outputs:?} outputs, more than one launch takes");
    }
    let launch = LaunchConfig {
        grid_dim: (of_columns as u32, of_depth as u32, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: types.iter().copied().map(shared_bytes).max().unwrap_or(0),
    };
    let held: Vec<_> = weights.iter().map(Tensor::storage_and_layout).collect();
    let x_storage = x.storage_and_layout();
    let Storage::Cuda(cuda) = &*x_storage.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let y = with_cuda_floats!(cuda, "x", T => {
        // SAFETY: the kernels write every element: of `y`, or of the parts and then of `y`.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, len)? };
        if len > 0 {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            let mut parts = match of_depth {
                1 => None,
                _ => Some(unsafe { alloc::<f32>(device, of_depth * len)? }),
            };
            let blocks = |index| In::optional(held.get(index), &stream);
            let rows = |index| outputs.get(index).map_or(0, |&rows: &usize| rows as u32);
            let bytes = |index| types.get(index).map_or(0, |t: &GgmlDType| t.type_size() as u32);
            macro_rules! launch {
                ($kernel:ident) => {
                    kernels::$kernel::<T> {
                        x: In::from_tensor(&x_storage, &stream)?,
                        blocks0: blocks(0)?,
                        blocks1: blocks(1)?,
                        blocks2: blocks(2)?,
                        blocks3: blocks(3)?,
                        y: Out::new(&mut y, &stream),
                        parts: match &mut parts {
                            Some(parts) => Out::new(parts, &stream),
                            None => Out::null(),
                        },
                        n: n as u32,
                        inputs: inputs as u32,
                        outputs0: rows(0),
                        outputs1: rows(1),
                        outputs2: rows(2),
                        outputs3: rows(3),
                        bytes0: bytes(0),
                        bytes1: bytes(1),
                        bytes2: bytes(2),
                        bytes3: bytes(3),
                    }
                    .launch(device, launch)?
                };
            }
            // SAFETY: the sizes match the tensors, which are aligned to 16 bytes. The blocks in x
            // cover the rows of the weights, and the shared memory has the segments of each type.
            #[allow(unsafe_code)]
            unsafe {
                if n <= FEW_ROWS {
                    launch!(linear_rows_16);
                } else {
                    launch!(linear_rows_64);
                }
            }
            if let Some(parts) = &parts {
                // SAFETY: there are `of_depth` parts of each result.
                #[allow(unsafe_code)]
                unsafe {
                    kernels::linear_rows_sum::<T> {
                        parts: In::from_slice(parts, &stream),
                        y: Out::new(&mut y, &stream),
                        len: len as u64,
                        count: of_depth as u32,
                    }
                    .launch(device, grid(len.div_ceil(THREADS_OF_SUM as usize), THREADS_OF_SUM)?)?;
                }
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    let y = as_tensor(y, &Shape::from(len));
    let mut start = 0;
    let results = outputs.into_iter().map(|outputs| {
        let result = y.narrow(0, start, n * outputs)?;
        start += n * outputs;
        result.reshape((n, outputs))
    });
    results.collect()
}

/// Returns a contiguous tensor whose first byte has an address that is a multiple of 16.
fn aligned(tensor: &Tensor, stream: &CudaStream) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    if address(&tensor, stream)?.is_multiple_of(16) {
        return Ok(tensor);
    }
    tensor.force_contiguous()
}

/// Shared memory of a block for weights with this type: two segments of each of a warp's rows. A
/// row has an odd number of 16-byte pieces, which cover a segment from any even address.
fn shared_bytes(block_type: GgmlDType) -> u32 {
    let segment = SEGMENT / block_type.block_size() * block_type.type_size();
    let row = 16 * ((segment + 14).div_ceil(16) | 1);
    (2 * WARPS * COLUMNS_OF_WARP * row) as u32
}

/// Computes `x w^T` for each weight, in their dtype. Two consecutive weights with the same shape
/// form one batch, whose step is the distance between their addresses.
fn by_cublas(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    let (m, k) = x.dims2()?;
    let weights = weights.iter().map(|&weight| match weight.dtype() {
        DType::U8 => crate::dequantize(weight, x.dtype()),
        _ => Ok(weight.clone()),
    });
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let x = x.storage_and_layout();
    let Storage::Cuda(x_cuda) = &*x.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let mut results = Vec::with_capacity(weights.len());
    with_cuda_floats!(x_cuda, "x", T => {
        let mut rest = weights.as_slice();
        while let Some((first, others)) = rest.split_first() {
            let count = 1 + usize::from(others.first().is_some_and(|w| w.dims() == first.dims()));
            let (batch, after) = rest.split_at(count);
            rest = after;
            let batch = batch.iter().map(|weight| weight.contiguous()).collect::<Result<Vec<_>>>()?;
            let storages: Vec<_> = batch.iter().map(Tensor::storage_and_layout).collect();
            let mut inputs = storages
                .iter()
                .enumerate()
                .map(|(index, storage)| Ok((index, In::<T>::from_tensor(storage, &stream)?)))
                .collect::<Result<Vec<_>>>()?;
            // The step must not be negative.
            inputs.sort_by_key(|(_, input)| *input.bits());
            let distance = *inputs[count - 1].1.bits() - *inputs[0].1.bits();
            let order: Vec<usize> = inputs.iter().map(|(index, _)| *index).collect();
            let n = first.dim(0)?;
            // SAFETY: the products write every element.
            #[allow(unsafe_code)]
            let mut y = unsafe { alloc::<T>(device, count * m * n)? };
            if m > 0 && n > 0 {
                let a = Matrix { elements: In::<T>::from_tensor(&x, &stream)?, is_transposed: false };
                let b = Matrix { elements: inputs.swap_remove(0).1, is_transposed: true };
                let batch = Batch { count, b_step: (distance / size_of::<T>() as u64) as i64 };
                // SAFETY: the sizes match the tensors, and the second weight is at this distance
                // from the first.
                #[allow(unsafe_code)]
                unsafe {
                    products(device, [m, k, n], &a, &b, &Out::new(&mut y, &stream), false, batch)?;
                }
            }
            let y = CudaStorage::wrap_cuda_slice(y, device.clone());
            let y = as_tensor(y, &Shape::from((count, m, n)));
            for index in 0..count {
                let place = order.iter().position(|other| *other == index).unwrap_or(index);
                results.push(y.narrow(0, place, 1)?.squeeze(0)?);
            }
        }
    });
    Ok(results)
}
