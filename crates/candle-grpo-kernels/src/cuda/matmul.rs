//! Matrix products with cuBLAS and f32 results. Candle's products return the dtype of their
//! operands.

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t,
};
use candle_core::cuda_backend::{CudaDevice, gemm_reduced_precision_f32};
use candle_core::{Error, Result, bail};

use super::argument::Argument;
use super::{CudaElement, In, Out};

/// A row-major matrix, or the transpose of one.
pub(super) struct Matrix<'a, T> {
    pub(super) elements: In<'a, T>,
    pub(super) is_transposed: bool,
}

/// Computes `c = a b`, or `c += a b` if `is_added`, of row-major `a` `[m, k]`, `b` `[k, n]` and `c`
/// `[m, n]`, none of them empty. Sums are in f32.
///
/// # Safety
///
/// The pointers must point to as many elements as the sizes require.
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
    // cuBLAS has column-major matrices, so it computes c^T = b^T a^T.
    let operation = |is_transposed| {
        if is_transposed {
            cublasOperation_t::CUBLAS_OP_T
        } else {
            cublasOperation_t::CUBLAS_OP_N
        }
    };
    let (alpha, beta) = (1f32, f32::from(u8::from(is_added)));
    let compute = if T::IS_F32 && gemm_reduced_precision_f32() {
        cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
    } else {
        cublasComputeType_t::CUBLAS_COMPUTE_32F
    };
    let blas = device.cublas_handle();
    // SAFETY: the caller guarantees the sizes. The rows of a matrix are adjacent, and alpha and
    // beta outlive the call.
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
