//! Products with weights that are either variables or frozen.

use std::ops::Range;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, bail,
};
use candle_grpo_kernels::{linear_rows, matmul};

use crate::weights::base_weights::numbers;

/// Number of quantized weight values to dequantize at a time: 16 MiB in f32.
const TILE: usize = 1 << 22;

/// Computes `x w^T` for `x` `[N, inputs]` and `weight` `[outputs, inputs]`, dense or in quantized
/// blocks.
///
/// On the CPU the result is bit-identical to [`linear_rows`], with a graph or without. A weight
/// that is not a variable gets no gradient. Candle's own matmul would compute one as large as the
/// weight, and discard it.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() {
        let operands = Operands {
            x: x.detach(),
            weight: weight.detach(),
        };
        return match (x.track_op(), weight.track_op()) {
            (false, false) => operands.product(),
            (_, false) => x.apply_op1(FrozenLinear(operands)),
            (_, true) => x.apply_op2(weight, TrainedLinear(operands)),
        };
    }
    if x.track_op() && !weight.track_op() {
        let x = x.contiguous()?;
        return x.apply_op1(FrozenLinear(Operands {
            x: x.detach(),
            weight: weight.clone(),
        }));
    }
    // Without a graph there is no gradient to skip.
    let products = tiles(weight, x.dtype()).map(|(_, weight)| x.matmul(&weight?.t()?));
    let products = products.collect::<Result<Vec<_>>>()?;
    match products.as_slice() {
        [product] => Ok(product.clone()),
        products => Tensor::cat(products, 1),
    }
}

/// Yields the [`numbers`] in `weight` in row tiles: a single tile, unless the weight is quantized.
pub(crate) fn tiles(
    weight: &Tensor,
    dtype: DType,
) -> impl Iterator<Item = (Range<usize>, Result<Tensor>)> {
    let rows = weight.dims()[0].max(1);
    let step = match weight.dtype() {
        // Each block byte holds at most two values.
        DType::U8 => (TILE / (2 * weight.elem_count() / rows).max(1)).max(1),
        _ => rows,
    };
    (0..rows).step_by(step).map(move |start| {
        let range = start..weight.dims()[0].min(start + step);
        let tile = weight.narrow(0, start, range.len());
        (range, tile.and_then(|tile| numbers(&tile, dtype)))
    })
}

/// A linear map's operands, without a graph.
struct Operands {
    /// `[N, inputs]`
    x: Tensor,
    /// `[outputs, inputs]`, dense or in quantized blocks.
    weight: Tensor,
}

impl Operands {
    fn product(&self) -> Result<Tensor> {
        Ok(linear_rows(&self.x, &[&self.weight])?.swap_remove(0))
    }

    /// The product's storage and shape.
    fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        let product = self.product()?;
        let (storage, layout) = product.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => Ok((storage.clone(), layout.shape().clone())),
            _ => bail!("x: not on the CPU, must be on the device of the weight"),
        }
    }
}

/// A linear map whose weight is not a variable.
struct FrozenLinear(Operands);

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, _x: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.on_cpu()
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;

        let weight = numbers(&self.0.weight, x.dtype())?;
        let (storage, weight_layout) = weight.storage_and_layout();
        let Storage::Cuda(weight) = &*storage else {
            bail!("weight: not on the GPU, must be on the device of x");
        };
        let (&[m, k], &[outputs, inputs]) = (layout.dims(), weight_layout.dims()) else {
            bail!("x: shape {:?}, must be [N, inputs]", layout.dims());
        };
        if k != inputs {
            bail!("x: shape [{m}, {k}], must be [N, {inputs}] for this weight");
        }
        let transposed = weight_layout.transpose(0, 1)?;
        let y = x.matmul(weight, (1, m, outputs, k), layout, &transposed)?;
        Ok((y, Shape::from((m, outputs))))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let weight = numbers(&self.0.weight, gradient.dtype())?;
        Ok(Some(matmul(gradient, &weight)?))
    }
}

/// A linear map whose weight is a variable, on the CPU.
struct TrainedLinear(Operands);

impl CustomOp2 for TrainedLinear {
    fn name(&self) -> &'static str {
        "trained-linear"
    }

    fn cpu_fwd(
        &self,
        _x: &CpuStorage,
        _x_layout: &Layout,
        _weight: &CpuStorage,
        _weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.on_cpu()
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_x = x.track_op().then(|| matmul(gradient, weight)).transpose()?;
        Ok((of_x, Some(matmul(&gradient.t()?, x)?)))
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
        let copies = [part, weight].map(|view| view.force_contiguous().unwrap());
        let expected = linear(&copies[0], &copies[1]).unwrap();
        assert_eq!(y, expected.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn a_wrong_shape_is_an_error_that_names_it() {
        let x = Var::from_tensor(&noise((5, 3))).unwrap();
        let error = linear(&x, &noise((4, 2))).unwrap_err().to_string();
        assert!(
            error.contains("shape [4, 2], must be [outputs, 3]"),
            "{error}"
        );
    }
}
