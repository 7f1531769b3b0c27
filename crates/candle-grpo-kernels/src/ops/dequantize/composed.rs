//! The composed twin of [`dequantize`](crate::dequantize()).

use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor};

/// [`dequantize`](crate::dequantize()) with Candle's own arithmetic, on the CPU.
pub fn dequantize(blocks: &Tensor, dtype: DType) -> Result<Tensor> {
    let block_type = crate::blocks::block_type(blocks)?;
    unchecked(blocks, block_type, dtype)
}

pub(crate) fn unchecked(blocks: &Tensor, block_type: GgmlDType, dtype: DType) -> Result<Tensor> {
    let shape = (blocks.dim(0)?, blocks.dim(1)? * block_type.block_size());
    if blocks.elem_count() == 0 {
        return Tensor::zeros(shape, dtype, blocks.device());
    }
    let bytes: Vec<u8> = blocks.detach().flatten_all()?.to_vec1()?;
    let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, block_type)?;
    QTensor::new(storage, shape)?
        .dequantize(&Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(blocks.device())
}
