//! Embedding lookup.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
use crate::{check, path};

/// Returns the rows in `weight` at `ids`.
///
/// The gradient with respect to `weight` has its shape and dtype. For a repeated token, gradients
/// are summed in f32, in token order.
///
/// # Shapes
///
/// - `ids`: `[..]`, integers below V
/// - `weight`: `[V, H]`, any float dtype
/// - result: `[.., H]`, the dtype of `weight`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if an id is out of range. Only the CPU checks ids,
/// because the check would synchronize a GPU.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::embedding;
///
/// let weight = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let ids = Tensor::new(&[1u32, 1, 0], &Device::Cpu)?;
/// assert_eq!(embedding(&ids, &weight)?.to_vec2::<f32>()?, [[3., 4.], [3., 4.], [1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let shape = shape(ids, weight)?;
    let ids = check::token_ids("ids", ids, weight.dims()[0], None)?;
    if !path::is_fused(weight) {
        return composed::rows(&ids, weight)?.reshape(shape);
    }
    weight.contiguous()?.apply_op1(Embedding { ids, shape })
}

/// Computes the backward pass for [`embedding`] and adds it to `sum` in place, without a graph.
///
/// Adds the rows in `gradient` to the rows in `sum` at `ids`, in order. Other rows are neither read
/// nor written. Tensors that share memory with `sum` change too. If the weight is tied to the
/// output layer, pass the output layer's gradient as `sum`.
///
/// # Shapes
///
/// - `sum`: `[V, H]`, contiguous, f32 (f64 for f64)
/// - `ids`: `[..]`, integers below V
/// - `gradient`: `[.., H]`, any float dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if an id is out of range (checked on the CPU only).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::add_embedding_gradient;
///
/// let sum = Tensor::new(&[[1f32], [2.], [3.]], &Device::Cpu)?;
/// let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu)?;
/// add_embedding_gradient(&sum, &ids, &Tensor::new(&[[10f32], [20.], [30.]], &Device::Cpu)?)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[21.], [2.], [43.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_embedding_gradient(sum: &Tensor, ids: &Tensor, gradient: &Tensor) -> Result<()> {
    let shape = shape(ids, sum)?;
    check::float("gradient", gradient)?;
    check::accumulator("sum", sum, gradient.dtype())?;
    if gradient.dims() != shape {
        bail!(
            "gradient: shape {:?}, must be {shape:?}, of ids and sum",
            gradient.dims()
        );
    }
    check::same_device(&[("sum", sum), ("gradient", gradient)])?;
    let ids = check::token_ids("ids", ids, sum.dims()[0], None)?;
    let gradient = gradient.detach().contiguous()?;
    #[cfg(feature = "cuda")]
    if path::is_fused(&gradient) && gradient.device().is_cuda() {
        if gradient.elem_count() == 0 {
            return Ok(());
        }
        return cuda::add(&sum.detach(), &ids, &gradient);
    }
    if !path::is_fused_on_cpu(&gradient) {
        return composed::add_rows(sum, &ids, &gradient);
    }
    with_element!(gradient.dtype(), "gradient", T => {
        cpu::add::<T>(sum, &ids, &gradient)
    })
}

/// Checks the arguments except id values, and returns the result shape.
pub(crate) fn shape(ids: &Tensor, weight: &Tensor) -> Result<Vec<usize>> {
    check::float("weight", weight)?;
    let &[_, width] = weight.dims() else {
        bail!("weight: shape {:?}, must be [V, H]", weight.dims());
    };
    check::width("weight", weight)?;
    check::same_device(&[("weight", weight), ("ids", ids)])?;
    Ok([ids.dims(), &[width]].concat())
}

/// The lookup in a contiguous `weight` `[V, H]`.
pub(crate) struct Embedding {
    /// u32 `[N]`.
    pub(crate) ids: Tensor,
    pub(crate) shape: Vec<usize>,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, (_, width)) = (slice::range(layout)?, layout.shape().dims2()?);
        let rows = with_floats!(weight, "weight", weight => {
            WithDType::to_cpu_storage_owned(cpu::forward(&weight[range], width, &self.ids)?)
        });
        Ok((rows, Shape::from(self.shape.as_slice())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weight: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward(weight, layout, self)
    }

    fn bwd(&self, weight: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if weight.device().is_cuda() {
            let sum = Tensor::zeros(weight.shape(), candle_core::DType::F32, weight.device())?;
            if gradient.elem_count() > 0 {
                cuda::add(&sum, &self.ids, &gradient)?;
            }
            return sum.to_dtype(weight.dtype()).map(Some);
        }
        with_element!(weight.dtype(), "weight", T => {
            cpu::backward::<T>(weight, &self.ids, &gradient).map(Some)
        })
    }
}
