//! The CUDA path of [`dequantize`](crate::dequantize()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::cuda::{CudaElement, In, Out, alloc, as_tensor, grid, kernels};

/// Threads per block, each with four values, as in the kernel.
const THREADS: u32 = 256;
const VALUES: usize = 4;

/// Returns the values `[outputs, inputs]` in contiguous, nonempty `blocks` with type `block_type`,
/// in `dtype`.
pub(crate) fn dequantize(
    blocks: &Tensor,
    block_type: GgmlDType,
    shape: (usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    let shape = Shape::from(shape);
    match dtype {
        DType::F32 => numbers::<f32>(blocks, block_type, &shape),
        DType::BF16 => numbers::<half::bf16>(blocks, block_type, &shape),
        DType::F16 => numbers::<half::f16>(blocks, block_type, &shape),
        _ => bail!("dtype: {dtype:?}, must be f32, bf16 or f16 on CUDA"),
    }
}

fn numbers<T: CudaElement>(
    blocks: &Tensor,
    block_type: GgmlDType,
    shape: &Shape,
) -> Result<Tensor> {
    let device = blocks.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let n = shape.elem_count() / block_type.block_size();
    let by_values = grid(
        shape.elem_count().div_ceil(VALUES * THREADS as usize),
        THREADS,
    )?;
    let blocks = blocks.storage_and_layout();
    // SAFETY: the kernel writes every value in the n blocks, all of whose bytes exist.
    #[allow(unsafe_code)]
    let y = unsafe {
        let mut y = alloc::<T>(device, shape.elem_count())?;
        kernels::dequantize::<T> {
            blocks: In::from_tensor(&blocks, &stream)?,
            y: Out::new(&mut y, &stream),
            n: n as u64,
            bytes: block_type.type_size() as u32,
        }
        .launch(device, by_values)?;
        y
    };
    let y = CudaStorage::wrap_cuda_slice(y, device.clone());
    Ok(as_tensor(y, shape))
}
