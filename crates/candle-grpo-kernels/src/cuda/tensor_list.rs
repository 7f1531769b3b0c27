//! Tensor lists for kernels that process all of them in one launch, as in `tensor_list.cuh`.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream};
use candle_core::{CudaDevice, DType, Result, Storage, Tensor, bail};

use super::argument::Argument;
use super::{In, with_cuda_floats};

/// The rows in the list, and the number of blocks in the launch.
#[derive(Debug, Default)]
pub(crate) struct TensorList {
    words: Vec<u64>,
    pub(crate) rows: u32,
    pub(crate) blocks: usize,
}

impl TensorList {
    /// Adds a row for a tensor with `blocks` blocks. `words` receives its first block.
    pub(crate) fn push<const N: usize>(
        &mut self,
        blocks: usize,
        words: impl FnOnce(u32) -> [u64; N],
    ) -> Result<()> {
        let Ok(first_block) = u32::try_from(self.blocks) else {
            bail!("{} blocks are more than a grid has", self.blocks);
        };
        self.words.extend(words(first_block));
        self.rows += 1;
        self.blocks += blocks;
        Ok(())
    }

    /// Copies the list to the GPU.
    pub(crate) fn upload(&self, device: &CudaDevice) -> Result<CudaSlice<u64>> {
        device.clone_htod(&self.words)
    }
}

/// Returns a contiguous float or u8 tensor's address. It is valid until the tensor is freed, which
/// happens after earlier launches.
pub(crate) fn address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let tensor = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*tensor.0 else {
        bail!("a tensor is on the CPU, must be on a GPU");
    };
    if storage.dtype() == DType::U8 {
        return Ok(*In::<u8>::from_tensor(&tensor, stream)?.bits());
    }
    with_cuda_floats!(storage, "tensors", T => Ok(*In::<T>::from_tensor(&tensor, stream)?.bits()))
}

/// Returns the kernels' code for a dtype.
pub(crate) fn dtype_number(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F16 => Ok(2),
        _ => bail!("dtype: {dtype:?}, must be f32, bf16 or f16"),
    }
}

/// Packs two numbers into a word.
pub(crate) fn word(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
