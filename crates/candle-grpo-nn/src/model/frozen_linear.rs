//! Products with weights that may be frozen.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, bail};

use crate::weights::base_weights::numbers;

/// Numbers of a weight in blocks that are dequantized at a time: 16 MiB of f32.
const TILE: usize = 1 << 22;

/// `x w^T` for `x` `[N, inputs]` and `weight` `[outputs, inputs]`, or its blocks of quantized
/// numbers.
///
/// A weight that is not a variable gets no gradient. Candle's own matmul computes one for it, as
/// large as the weight, and discards it.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if x.track_op() && !weight.track_op() {
        return x.contiguous()?.apply_op1(FrozenLinear {
            weight: weight.clone(),
        });
    }
    // Without a graph there is no gradient to skip.
    let products = tiles(weight, x.dtype()).map(|(_, weight)| x.matmul(&weight?.t()?));
    let products = products.collect::<Result<Vec<_>>>()?;
    match products.as_slice() {
        [product] => Ok(product.clone()),
        products => Tensor::cat(products, 1),
    }
}

/// The [`numbers`] of `weight` in tiles of rows: one tile, unless it is in blocks.
pub(crate) fn tiles(
    weight: &Tensor,
    dtype: DType,
) -> impl Iterator<Item = (Range<usize>, Result<Tensor>)> {
    let rows = weight.dims()[0].max(1);
    let step = match weight.dtype() {
        // A byte of a block has at most two numbers.
        DType::U8 => (TILE / (2 * weight.elem_count() / rows).max(1)).max(1),
        _ => rows,
    };
    (0..rows).step_by(step).map(move |start| {
        let range = start..weight.dims()[0].min(start + step);
        let tile = weight.narrow(0, start, range.len());
        (range, tile.and_then(|tile| numbers(&tile, dtype)))
    })
}

struct FrozenLinear {
    /// `[outputs, inputs]` or its blocks, not tracked.
    weight: Tensor,
}

impl FrozenLinear {
    /// `[m, k]` times the transposed `weight` `[outputs, k]`, whose storage is `weight_storage`.
    fn forward<S: BackendStorage>(
        x: &S,
        layout: &Layout,
        weight_storage: &S,
        weight_layout: &Layout,
    ) -> Result<(S, Shape)> {
        let (&[m, k], &[outputs, inputs]) = (layout.dims(), weight_layout.dims()) else {
            bail!("x: shape {:?}, must be [N, inputs]", layout.dims());
        };
        if k != inputs {
            bail!("x: shape [{m}, {k}], must be [N, {inputs}] for this weight");
        }
        let transposed = weight_layout.transpose(0, 1)?;
        let y = x.matmul(weight_storage, (1, m, outputs, k), layout, &transposed)?;
        Ok((y, Shape::from((m, outputs))))
    }
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let weight = numbers(&self.weight, x.dtype())?;
        let (storage, weight_layout) = weight.storage_and_layout();
        match &*storage {
            Storage::Cpu(weight) => Self::forward(x, layout, weight, weight_layout),
            _ => bail!("weight: not on the CPU, must be on the device of x"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let weight = numbers(&self.weight, x.dtype())?;
        let (storage, weight_layout) = weight.storage_and_layout();
        match &*storage {
            Storage::Cuda(weight) => Self::forward(x, layout, weight, weight_layout),
            _ => bail!("weight: not on the GPU, must be on the device of x"),
        }
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let weight = numbers(&self.weight, gradient.dtype())?;
        Ok(Some(gradient.contiguous()?.matmul(&weight)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};
    use candle_grpo_test_support::noise_tensor;

    fn noise(shape: (usize, usize)) -> Tensor {
        noise_tensor(shape, shape.0 as u64, DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_frozen_weight_gives_the_same_product_and_gets_no_gradient() {
        let x = Var::from_tensor(&noise((5, 3))).unwrap();
        let weight = Var::from_tensor(&noise((4, 3))).unwrap();
        let frozen = weight.as_detached_tensor();
        let slope = noise((5, 4));
        let gradients = |y: Tensor| (y * &slope).unwrap().sum_all().unwrap().backward().unwrap();

        let y = linear(&x, &frozen).unwrap();
        let trained = linear(&x, &weight).unwrap();
        assert_eq!(
            y.to_vec2::<f32>().unwrap(),
            trained.to_vec2::<f32>().unwrap()
        );
        let (frozen_gradients, trained_gradients) = (gradients(y), gradients(trained));
        assert!(frozen_gradients.get(&frozen).is_none());
        assert!(trained_gradients.get(&weight).is_some());
        let dx = |store: &candle_core::backprop::GradStore| -> Vec<Vec<f32>> {
            store.get(&x).unwrap().to_vec2().unwrap()
        };
        assert_eq!(dx(&frozen_gradients), dx(&trained_gradients));
    }

    #[test]
    fn views_of_larger_tensors_are_read_in_place() {
        let x = Var::from_tensor(&noise((6, 3))).unwrap();
        let part = x.narrow(0, 2, 3).unwrap();
        let weight = noise((8, 3)).narrow(0, 1, 4).unwrap();
        let y = linear(&part, &weight).unwrap().to_vec2::<f32>().unwrap();
        let plain = part.matmul(&weight.t().unwrap()).unwrap();
        assert_eq!(y, plain.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn a_wrong_shape_is_an_error_that_names_it() {
        let x = Var::from_tensor(&noise((5, 3))).unwrap();
        let error = linear(&x, &noise((4, 2))).unwrap_err().to_string();
        assert!(error.contains("must be [N, 2] for this weight"), "{error}");
    }
}
