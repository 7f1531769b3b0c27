//! Float dtypes that kernels read and write.

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType_t;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use half::{bf16, f16};

/// A float with up to 32 bits.
pub(crate) trait CudaElement: CudaDType + DeviceRepr {
    /// Suffix in kernel names.
    const SUFFIX: &'static str;
    /// cuBLAS type.
    const BLAS: cudaDataType_t;
    const IS_F32: bool = false;
}

impl CudaElement for f32 {
    const SUFFIX: &'static str = "_f32";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_32F;
    const IS_F32: bool = true;
}

impl CudaElement for bf16 {
    const SUFFIX: &'static str = "_bf16";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

impl CudaElement for f16 {
    const SUFFIX: &'static str = "_f16";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16F;
}

/// Like [`with_element`](crate::cpu::with_element), for the dtype in a CUDA storage.
macro_rules! with_cuda_floats {
    ($storage:expr, $name:literal, $element:ident => $body:expr) => {
        crate::cpu::with_element!(
            candle_core::backend::BackendStorage::dtype($storage),
            $name,
            $element => $body
        )
    };
}
pub(crate) use with_cuda_floats;
