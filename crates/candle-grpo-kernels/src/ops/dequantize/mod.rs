//! Matrices in quantized blocks.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::blocks::{BLOCK_TYPES, block_type};
use crate::check;

/// Quantizes the rows of a matrix to blocks, as in GGUF files.
///
/// # Shapes
///
/// - `x`: `[outputs, inputs]`, any float dtype. `inputs` is a multiple of the block size: 256
///   values for Q4K, Q5K and Q6K, 32 for the others.
/// - result: u8 `[outputs, inputs / block size, bytes per block]`, on the device of `x`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if `dtype` is not in [`BLOCK_TYPES`].
///
/// ```
/// use candle_core::quantized::GgmlDType;
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::{dequantize, quantize};
///
/// let x = Tensor::arange(0f32, 64., &Device::Cpu)?.reshape((2, 32))?;
/// let blocks = quantize(&x, GgmlDType::Q8_0)?;
/// assert_eq!(blocks.dims(), [2, 1, 34]);
/// let difference = (dequantize(&blocks, DType::F32)? - x)?.abs()?.max_all()?;
/// assert!(difference.to_scalar::<f32>()? < 0.3); // half of 63 / 127
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn quantize(x: &Tensor, dtype: GgmlDType) -> Result<Tensor> {
    check::float("x", x)?;
    if !BLOCK_TYPES.contains(&dtype) {
        bail!("dtype: {dtype:?}, must be one of {BLOCK_TYPES:?}");
    }
    let size = dtype.block_size();
    let &[outputs, inputs] = x.dims() else {
        bail!("x: shape {:?}, must be [outputs, inputs]", x.dims());
    };
    if inputs == 0 || !inputs.is_multiple_of(size) {
        bail!("x: rows of {inputs} numbers, must be a multiple of {size} for {dtype:?}");
    }
    let shape = (outputs, inputs / size, dtype.type_size());
    if outputs == 0 {
        return Tensor::zeros(shape, DType::U8, x.device());
    }
    let x = x.detach().to_dtype(DType::F32)?;
    let on_host = x.to_device(&Device::Cpu)?.contiguous()?;
    let quantized = QTensor::quantize(&on_host, dtype)?;
    Tensor::from_vec(quantized.data()?.into_owned(), shape, x.device())
}

/// Dequantizes a matrix, from [`quantize`] or from a GGUF file.
///
/// # Shapes
///
/// - `blocks`: u8 `[outputs, blocks per row, bytes per block]`. The number of bytes determines the
///   type.
/// - result: `[outputs, inputs]` in `dtype`: f32, bf16, f16 or f64
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
pub fn dequantize(blocks: &Tensor, dtype: DType) -> Result<Tensor> {
    let block_type = block_type(blocks)?;
    if !dtype.is_float() {
        bail!("dtype: {dtype:?}, must be a float dtype");
    }
    let shape = (blocks.dim(0)?, blocks.dim(1)? * block_type.block_size());
    let has_path = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if !has_path || blocks.elem_count() == 0 {
        return composed::unchecked(blocks, block_type, dtype);
    }
    let blocks = blocks.contiguous()?;
    #[cfg(feature = "cuda")]
    if blocks.device().is_cuda() {
        return cuda::dequantize(&blocks, block_type, shape, dtype);
    }
    if !blocks.device().is_cpu() {
        return composed::unchecked(&blocks, block_type, dtype);
    }
    crate::cpu::with_element!(dtype, "dtype", Float => {
        Tensor::from_vec(cpu::dequantize::<Float>(&blocks, block_type)?, shape, &Device::Cpu)
    })
}
