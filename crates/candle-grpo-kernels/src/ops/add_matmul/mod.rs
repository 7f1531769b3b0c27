//! Matrix products, either returned or added to a sum.

pub(crate) mod composed;
mod cpu;

use candle_core::{DType, Result, Tensor, bail};

use crate::cpu::with_element;
use crate::{check, path};

/// Computes `sum += a b` in place, for gradients that accumulate over micro-batches or uses.
///
/// Tensors that share memory with `sum` change too. The result does not depend on the number of
/// cores. On the CPU, bf16 and f16 are multiplied in f32, except that processors with `avx512_bf16`
/// multiply bf16 directly. A `sum` in bf16 or f16 is added in f32 and rounded once.
///
/// # Shapes
///
/// - `a`: `[M, K]`, `b`: `[K, N]`, with the same float dtype and any layout
/// - `sum`: `[M, N]`, contiguous, with the same dtype, or f32 for bf16 and f16
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if `a` or `b` shares memory with `sum`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::add_matmul;
///
/// let sum = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let a = Tensor::new(&[[2f32, 3.]], &Device::Cpu)?;
/// let b = Tensor::new(&[[4f32], [5.]], &Device::Cpu)?;
/// add_matmul(&sum, &a, &b)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[24.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_matmul(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    check(sum, a, b)?;
    if sum.elem_count() == 0 || a.elem_count() == 0 {
        return Ok(());
    }
    if path::is_fused_on_cpu(a) {
        return with_element!(a.dtype(), "a", Float => cpu::add_matmul::<Float>(sum, a, b));
    }
    #[cfg(feature = "cuda")]
    if path::is_fused(a) && a.device().is_cuda() {
        return crate::cuda::matmul::product(&a.detach(), &b.detach(), &sum.detach(), true);
    }
    composed::unchecked(sum, a, b)
}

/// Computes `a b`. Sums are at least f32, and rounded once.
///
/// On the CPU, bf16 and f16 are multiplied as in [`add_matmul`]. Candle multiplies all other
/// tensors. There is no gradient.
///
/// # Shapes
///
/// - `a`: `[M, K]`, `b`: `[K, N]`, with the same float dtype and any layout
/// - the result: `[M, N]`, with the same dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::matmul;
///
/// let a = Tensor::new(&[[2f32, 3.]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let b = Tensor::new(&[[4f32], [5.]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// assert_eq!(matmul(&a, &b)?.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[23.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.detach(), b.detach());
    check::float("a", &a)?;
    check::same_dtype("b", &b, "a", &a)?;
    check::same_device(&[("a", &a), ("b", &b)])?;
    let (m, n) = match (a.dims(), b.dims()) {
        (&[m, k], &[inner, n]) if k == inner => (m, n),
        (a, b) => bail!("a, b: shapes {a:?} and {b:?}, must be [M, K] and [K, N]"),
    };
    if a.elem_count() == 0 || n == 0 {
        return Tensor::zeros((m, n), a.dtype(), a.device());
    }
    if !path::is_fused_on_cpu(&a) || a.dtype() == DType::F32 {
        // Candle multiplies contiguous tensors and their transposes on every device.
        let plain = |x: Tensor| {
            if x.layout().is_fortran_contiguous() {
                Ok(x)
            } else {
                x.contiguous()
            }
        };
        return plain(a)?.matmul(&plain(b)?);
    }
    with_element!(a.dtype(), "a", Float => {
        Tensor::from_vec(cpu::product::<Float>(&a, &b)?, (m, n), a.device())
    })
}

pub(crate) fn check(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    check::float("a", a)?;
    check::same_dtype("b", b, "a", a)?;
    if sum.dtype() != a.dtype() {
        check::accumulator("sum", sum, a.dtype())?;
    }
    check::contiguous("sum", sum)?;
    let fits = match (sum.dims(), a.dims(), b.dims()) {
        (&[m, n], &[rows, k], &[inner, columns]) => (m, n, k) == (rows, columns, inner),
        _ => false,
    };
    if !fits {
        bail!(
            "sum, a, b: shapes {:?}, {:?} and {:?}, must be [M, N], [M, K] and [K, N]",
            sum.dims(),
            a.dims(),
            b.dims()
        );
    }
    check::same_device(&[("sum", sum), ("a", a), ("b", b)])?;
    check::apart("sum", &[sum], &[a, b])
}
