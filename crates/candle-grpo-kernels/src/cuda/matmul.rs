//! Matrix products of cuBLAS. Candle's give the dtype of their operands; sums of many products, and logits, are wanted in f32.

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t,
};
use candle_core::cuda_backend::{CudaDevice, gemm_reduced_precision_f32};
use candle_core::{Error, Result, bail};

use super::argument::Argument;
use super::{CudaElement, In, Out};

/// A matrix row by row, or the transpose of one.
pub(super) struct Matrix<'a, T> {
    pub(super) elements: In<'a, T>,
    pub(super) is_transposed: bool,
}

/// `c = a b`, or `c += a b` if that `is_added`: `a` `[m, k]`, `b` `[k, n]` and `c` `[m, n]`, row by row, none of them empty. Products are
/// added in f32.
///
/// # Safety
///
/// The pointers must be to as many elements as that.
#[allow(unsafe_code)]
pub(super) unsafe fn matmul<T: CudaElement>(
    device: &CudaDevice,
    [m, k, n]: [usize; 3],
    a: &Matrix<T>,
    b: &Matrix<T>,
    c: &Out<f32>,
    is_added: bool,
) -> Result<()> {
    let int = |size: usize| match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix of {size} rows or columns, must be below 2^31 on CUDA"),
    };
    let (m, k, n) = (int(m)?, int(k)?, int(n)?);
    // cuBLAS has its matrices column by column: what lies row by row is transposed to it. So it is told of c^T = b^T a^T.
    let operation = |is_transposed| match is_transposed {
        true => cublasOperation_t::CUBLAS_OP_T,
        false => cublasOperation_t::CUBLAS_OP_N,
    };
    let (alpha, beta) = (1f32, f32::from(u8::from(is_added)));
    let compute = if T::IS_F32 && gemm_reduced_precision_f32() {
        cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
    } else {
        cublasComputeType_t::CUBLAS_COMPUTE_32F
    };
    let blas = device.cublas_handle();
    // SAFETY: the sizes are the caller's; a row of a matrix follows the one before, and the numbers outlive the call.
    unsafe {
        gemm_ex(
            *blas.handle(),
            operation(b.is_transposed),
            operation(a.is_transposed),
            n,
            m,
            k,
            (&raw const alpha).cast(),
            *b.elements.bits() as *const _,
            T::BLAS,
            if b.is_transposed { k } else { n },
            *a.elements.bits() as *const _,
            T::BLAS,
            if a.is_transposed { m } else { k },
            (&raw const beta).cast(),
            *c.bits() as *mut _,
            f32::BLAS,
            n,
            compute,
            cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(Error::wrap)
}
