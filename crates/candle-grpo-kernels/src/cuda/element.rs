//! The float dtypes that kernels read and write.

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType_t;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use half::{bf16, f16};

/// A float of up to 32 bits, for which kernels exist.
pub(crate) trait CudaElement: CudaDType + DeviceRepr {
    /// How the names of its kernels end.
    const SUFFIX: &'static str;
    /// What cuBLAS calls it.
    const BLAS: cudaDataType_t;
    const IS_F32: bool = false;
}

impl CudaElement for f32 {
    const SUFFIX: &'static str = "f32";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_32F;
    const IS_F32: bool = true;
}

impl CudaElement for bf16 {
    const SUFFIX: &'static str = "bf16";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

impl CudaElement for f16 {
    const SUFFIX: &'static str = "f16";
    const BLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16F;
}

/// Runs `$body` with `$element` the float dtype of a storage, or errs with the name of the argument.
macro_rules! with_cuda_floats {
    ($storage:expr, $name:literal, $element:ident => $body:expr) => {
        match candle_core::backend::BackendStorage::dtype($storage) {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            dtype => candle_core::bail!("{}: {dtype:?}, must be f32, bf16 or f16", $name),
        }
    };
}
pub(crate) use with_cuda_floats;
