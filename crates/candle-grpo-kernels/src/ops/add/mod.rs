//! The sum of two tensors.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};

use crate::cpu::{slice, with_floats};
use crate::{check, path};

/// Computes `a + b`, for tensors with the same shape and float dtype.
///
/// Candle adds f64. bf16 and f16 are added in f32 and rounded once. Both inputs get gradients.
///
/// # Errors
///
/// Fails if shapes or dtypes differ.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::add;
///
/// let a = Tensor::new(&[1f32, 2.], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// assert_eq!(add(&a, &a)?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [2., 4.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    check::float("a", a)?;
    check::same_shape("b", b, "a", a)?;
    check::same_dtype("b", b, "a", a)?;
    check::same_device(&[("a", a), ("b", b)])?;
    if !path::is_fused(a) {
        return a + b;
    }
    a.contiguous()?.apply_op2(&b.contiguous()?, Add)
}

struct Add;

impl CustomOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (a_range, b_range) = (slice::range(a_layout)?, slice::range(b_layout)?);
        let sum = with_floats!(a, "a", a => {
            let b = &b.as_slice()?[b_range];
            WithDType::to_cpu_storage_owned(cpu::forward(&a[a_range], b))
        });
        Ok((sum, a_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        a: &candle_core::CudaStorage,
        a_layout: &Layout,
        b: &candle_core::CudaStorage,
        b_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward((a, a_layout), (b, b_layout))
    }

    fn bwd(
        &self,
        _a: &Tensor,
        _b: &Tensor,
        _sum: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(gradient.clone()), Some(gradient.clone())))
    }
}
