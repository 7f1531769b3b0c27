//! A linear map.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_kernels::{add_matmul, linear_rows};
use candle_nn::VarBuilder;

use crate::model::frozen_linear::linear;
use crate::model::named_weight::Weight;
use crate::optim::grad_sink::GradientSink;

/// `y = x w^T + bias` for flat rows, plus what a low-rank adapter adds. Rows are flat because a matmul with a batch dimension
/// would broadcast the weight, and its gradient, once per batch row.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    adapter: Option<Adapter>,
}

/// `scaling * x a^T b^T`.
#[derive(Debug, Clone)]
struct Adapter {
    /// `[rank, inputs]`
    a: Weight,
    /// `[outputs, rank]`
    b: Weight,
    scaling: f64,
}

/// Where an adapter of a linear map is found in a builder, beside `weight`.
pub(crate) const LORA_A: &str = "lora_A.weight";
/// See [`LORA_A`].
pub(crate) const LORA_B: &str = "lora_B.weight";
/// A scalar; see [`LORA_A`].
pub(crate) const LORA_SCALING: &str = "lora_scaling";

impl Linear {
    pub(crate) fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: Weight::get(&vb, (outputs, inputs), "weight")?,
            bias: None,
            adapter: match vb.contains_tensor(LORA_A) {
                true => Some(Adapter::new(inputs, outputs, &vb)?),
                false => None,
            },
        })
    }

    pub(crate) fn with_bias(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let bias = Weight::get(&vb, outputs, "bias")?;
        Ok(Self {
            bias: Some(bias),
            ..Self::new(inputs, outputs, vb)?
        })
    }

    /// [N, inputs] to [N, outputs].
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = linear(x, &self.weight.tensor)?;
        if let Some(bias) = &self.bias {
            y = y.broadcast_add(&bias.tensor)?;
        }
        match &self.adapter {
            None => Ok(y),
            Some(adapter) => y + adapter.forward(x)?,
        }
    }

    /// The gradient of `x` from that of the result; it is added to `sum`, the gradient by other maps of the same `x`.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sum: Option<Tensor>,
        sink: &mut GradientSink,
    ) -> Result<Tensor> {
        sink.add_product(&self.weight, &gradient.t()?, x)?;
        if let Some(bias) = &self.bias {
            sink.add(bias, || gradient.sum(0))?;
        }
        let of_x = plus_product(sum, gradient, &self.weight.tensor)?;
        match &self.adapter {
            None => Ok(of_x),
            Some(adapter) => adapter.backward(x, gradient, of_x, sink),
        }
    }

    /// Several maps of the same rows `[N, inputs]`, each row by itself: see [`linear_rows`]. No gradient.
    pub(crate) fn forward_rows<const M: usize>(
        maps: [&Self; M],
        x: &Tensor,
    ) -> Result<[Tensor; M]> {
        let x = &x.detach();
        let weights = maps.map(|map| map.weight.tensor.detach());
        let mut results = linear_rows(x, &weights.each_ref())?;
        for (map, y) in maps.iter().zip(&mut results) {
            if let Some(bias) = &map.bias {
                *y = y.broadcast_add(&bias.tensor.detach())?;
            }
            if let Some(Adapter { a, b, scaling }) = &map.adapter {
                let narrow = linear_rows(x, &[&a.tensor.detach()])?;
                let change = linear_rows(&narrow[0], &[&b.tensor.detach()])?;
                *y = (&*y + (&change[0] * *scaling)?)?;
            }
        }
        match results.try_into() {
            Ok(results) => Ok(results),
            Err(results) => bail!("{} results of {M} maps", results.len()),
        }
    }
}

impl Adapter {
    fn new(inputs: usize, outputs: usize, vb: &VarBuilder) -> Result<Self> {
        let weight =
            |name| Ok::<_, candle_core::Error>(Weight::new(vb, vb.get_unchecked(name)?, name));
        let (a, b) = (weight(LORA_A)?, weight(LORA_B)?);
        match (a.tensor.dims(), b.tensor.dims()) {
            (&[rank, i], &[o, r]) if rank == r && (i, o) == (inputs, outputs) => {}
            _ => bail!(
                "{LORA_A} and {LORA_B} have shapes {:?} and {:?}, they must be [rank, {inputs}] and [{outputs}, rank]",
                a.tensor.dims(),
                b.tensor.dims()
            ),
        }
        let scaling = vb.get_unchecked_dtype(LORA_SCALING, DType::F64)?;
        Ok(Self {
            a,
            b,
            scaling: scaling.to_scalar::<f64>()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(&linear(x, &self.a.tensor)?, &self.b.tensor)? * self.scaling
    }

    /// As [`Linear::backward`].
    fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sum: Tensor,
        sink: &mut GradientSink,
    ) -> Result<Tensor> {
        let gradient = (gradient * self.scaling)?;
        let inner = linear(x, &self.a.tensor)?;
        sink.add_product(&self.b, &gradient.t()?, &inner)?;
        let of_inner = gradient.matmul(&self.b.tensor)?;
        sink.add_product(&self.a, &of_inner.t()?, x)?;
        plus_product(Some(sum), &of_inner, &self.a.tensor)
    }
}

/// `sum + a b`; in the memory of `sum` if it has the dtype of sums.
fn plus_product(sum: Option<Tensor>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match sum {
        None => a.matmul(b),
        Some(sum) if matches!(sum.dtype(), DType::F32 | DType::F64) => {
            add_matmul(&sum, a, b)?;
            Ok(sum)
        }
        Some(sum) => sum + a.matmul(b)?,
    }
}
