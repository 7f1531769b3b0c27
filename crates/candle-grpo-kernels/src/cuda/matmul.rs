//! Matrix products with cuBLAS that add to a sum, or have f32 results. Candle's products return the
//! dtype of their operands.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublas::result::gemm_strided_batched_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t,
};
use candle_core::cuda_backend::{CudaDevice, gemm_reduced_precision_f32};
use candle_core::{DType, Error, Result, Storage, Tensor, bail};

use super::argument::Argument;
use super::in_place::write;
use super::{CudaElement, In, Out, with_cuda_floats};

/// A row-major matrix, or its transpose.
pub(crate) struct Matrix<'a, T> {
    pub(crate) elements: In<'a, T>,
    pub(crate) is_transposed: bool,
}

/// Computes `c = a b`, or `c += a b` if `is_added`, for row-major `a` `[m, k]`, `b` `[k, n]` and
/// `c` `[m, n]`, all nonempty. Sums are in f32.
///
/// # Safety
///
/// The pointers must cover as many elements as the sizes require.
#[allow(unsafe_code)]
pub(crate) unsafe fn matmul<T: CudaElement, C: CudaElement>(
    device: &CudaDevice,
    sizes: [usize; 3],
    a: &Matrix<T>,
    b: &Matrix<T>,
    c: &Out<C>,
    is_added: bool,
) -> Result<()> {
    // SAFETY: the caller's promise, for one product.
    unsafe { products(device, sizes, a, b, c, is_added, Batch::ONE) }
}

/// A batch of products with equal sizes.
#[derive(Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) count: usize,
    /// Distance in elements between one `b` and the next.
    pub(crate) b_step: i64,
}

impl Batch {
    const ONE: Self = Self {
        count: 1,
        b_step: 0,
    };
}

/// Like [`matmul`], for one `a` and each `b` in a batch. The results are concatenated.
///
/// # Safety
///
/// Same as [`matmul`], for each product.
#[allow(unsafe_code)]
pub(crate) unsafe fn products<T: CudaElement, C: CudaElement>(
    device: &CudaDevice,
    [m, k, n]: [usize; 3],
    a: &Matrix<T>,
    b: &Matrix<T>,
    c: &Out<C>,
    is_added: bool,
    batch: Batch,
) -> Result<()> {
    let int = |size: usize| match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix of {size} rows or columns, must be below 2^31 on CUDA"),
    };
    let (m, k, n) = (int(m)?, int(k)?, int(n)?);
    // cuBLAS is column-major, so this computes c^T = b^T a^T.
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
    // SAFETY: the caller guarantees the sizes. Matrix rows are adjacent, and alpha and beta outlive
    // the call.
    unsafe {
        gemm_strided_batched_ex(
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
            batch.b_step,
            *a.elements.bits() as *const _,
            T::BLAS,
            if a.is_transposed { m } else { k },
            0,
            (&raw const beta).cast(),
            *c.bits() as *mut _,
            C::BLAS,
            n,
            i64::from(m) * i64::from(n),
            int(batch.count)?,
            compute,
            // The other default allows f16 products for f32 operands.
            if T::IS_F32 {
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT
            } else {
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP
            },
        )
    }
    .map_err(Error::wrap)
}

/// Computes `c = a b`, or `c += a b` if `is_added`, for nonempty matrices. `c` is contiguous, and
/// f32 or in the dtype of `a`.
pub(crate) fn product(a: &Tensor, b: &Tensor, c: &Tensor, is_added: bool) -> Result<()> {
    let ((m, k), n) = (a.dims2()?, b.dim(1)?);
    let ((a, is_a_transposed), (b, is_b_transposed)) = (rows(a)?, rows(b)?);
    let (a, b) = (a.storage_and_layout(), b.storage_and_layout());
    write(c, |c, layout| {
        let device = c.device.clone();
        let stream = device.cuda_stream();
        let Storage::Cuda(cuda_a) = &*a.0 else {
            bail!("a: on the CPU, must be on a GPU");
        };
        with_cuda_floats!(cuda_a, "a", T => {
            let a = Matrix {
                elements: In::<T>::from_tensor(&a, &stream)?,
                is_transposed: is_a_transposed,
            };
            let b = Matrix {
                elements: In::<T>::from_tensor(&b, &stream)?,
                is_transposed: is_b_transposed,
            };
            // SAFETY: the sizes match the tensors.
            #[allow(unsafe_code)]
            unsafe {
                if c.dtype() == DType::F32 {
                    let c = Out::<f32>::in_place(c, layout, &stream)?;
                    matmul(&device, [m, k, n], &a, &b, &c, is_added)?;
                } else {
                    let c = Out::<T>::in_place(c, layout, &stream)?;
                    matmul(&device, [m, k, n], &a, &b, &c, is_added)?;
                }
            }
        });
        Ok(())
    })
}

/// Returns a contiguous tensor, and whether it is the transpose of `x`.
fn rows(x: &Tensor) -> Result<(Tensor, bool)> {
    let transposed = x.t()?;
    if !x.is_contiguous() && transposed.is_contiguous() {
        return Ok((transposed, true));
    }
    Ok((x.contiguous()?, false))
}
