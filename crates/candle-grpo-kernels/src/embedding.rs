//! Rows of a table by number.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{with_element, with_floats};
use crate::{check, composed, cpu, path};

/// The rows of `weight` `[V, H]` that `ids` `[..]` name, `[.., H]` in the dtype of `weight`.
///
/// `weight` is of any float dtype, `ids` are integers below V. The gradient of `weight` is `[V, H]` in its dtype; the
/// gradients of a token that stands more than once are summed in f32, in the order of the tokens. Errs on other shapes
/// and dtypes, and on ids that are out of range (checked on the CPU; on a GPU that would be a transfer).
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
        return composed::embedding_rows(&ids, weight)?.reshape(shape);
    }
    weight.contiguous()?.apply_op1(Embedding { ids, shape })
}

/// The backward pass of [`embedding`] alone, into memory that holds a sum already: to the rows of `sum` `[V, H]` that `ids`
/// `[..]` name, those of `gradient` `[.., H]` are added in place. What shares the memory of `sum` changes too.
///
/// `sum` is contiguous, of f32, or f64 for f64; `gradient` is of any float dtype. Only the rows that are named are touched, and the
/// gradients of a token are summed in their order. With a weight that is also the output layer, the gradient of the one is
/// added to that of the other so. Errs on other shapes and dtypes, and on ids that are out of range (checked on the CPU).
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
        // Parallel over tokens; Candle's index_add goes through them one after another.
        let rows = crate::cuda::embedding::backward(sum, &ids, &gradient)?;
        let sum = sum.detach();
        return sum.slice_set(&(&sum + rows.to_dtype(sum.dtype())?)?, 0, 0);
    }
    if !path::is_fused_on_cpu(&gradient) {
        return composed::add_embedding_rows(sum, &ids, &gradient);
    }
    with_element!(gradient.dtype(), "gradient", T => {
        cpu::embedding::add::<T>(sum, &ids, &gradient)
    })
}

/// The shape of the result, of arguments that fit but for the ids themselves.
pub(crate) fn shape(ids: &Tensor, weight: &Tensor) -> Result<Vec<usize>> {
    check::float("weight", weight)?;
    let &[_, width] = weight.dims() else {
        bail!("weight: shape {:?}, must be [V, H]", weight.dims());
    };
    check::width("weight", weight)?;
    check::same_device(&[("weight", weight), ("ids", ids)])?;
    Ok([ids.dims(), &[width]].concat())
}

/// `weight` `[V, H]`, contiguous, to `shape`.
pub(crate) struct Embedding {
    /// `[N]` of u32.
    pub(crate) ids: Tensor,
    pub(crate) shape: Vec<usize>,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (range, (_, width)) = (cpu::range(layout)?, layout.shape().dims2()?);
        let rows = with_floats!(weight, "weight", weight => {
            WithDType::to_cpu_storage_owned(cpu::embedding::forward(&weight[range], width, &self.ids)?)
        });
        Ok((rows, Shape::from(self.shape.as_slice())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weight: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::embedding::forward(weight, layout, self)
    }

    fn bwd(&self, weight: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if weight.device().is_cuda() {
            return crate::cuda::embedding::backward(weight, &self.ids, &gradient).map(Some);
        }
        with_element!(weight.dtype(), "weight", T => {
            cpu::embedding::backward::<T>(weight, &self.ids, &gradient).map(Some)
        })
    }
}
