//! Matrix products, and those added to a sum.

pub(crate) mod composed;
mod cpu;

use candle_core::{DType, Result, Tensor, bail};

use crate::cpu::with_element;
use crate::{check, path};

/// Computes `sum += a b` in place, for gradients that accumulate over micro-batches or uses.
///
/// Tensors that share the memory of `sum` change too. The result is the same on any number of
/// cores. bf16 and f16 are multiplied in f32 on the CPU, except bf16 on processors with
/// `avx512_bf16`, which multiply it as it is.
///
/// # Shapes
///
/// - `a`: `[M, K]`, `b`: `[K, N]`, of one float dtype and any layout
/// - `sum`: `[M, N]`, contiguous, f32 (f64 for f64)
///
/// # Errors
///
/// Fails on other shapes and dtypes, and if `a` or `b` shares the memory of `sum`.
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

/// Computes `a b`. Sums are in f32 at least, and rounded once.
///
/// bf16 and f16 on the CPU are multiplied as by [`add_matmul`], and other tensors by Candle. There
/// is no gradient.
///
/// # Shapes
///
/// - `a`: `[M, K]`, `b`: `[K, N]`, of one float dtype and any layout
/// - the result: `[M, N]`, of the same dtype
///
/// # Errors
///
/// Fails on other shapes and dtypes.
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
    check::accumulator("sum", sum, a.dtype())?;
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
