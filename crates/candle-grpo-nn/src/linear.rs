//! A linear map.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_kernels::linear_rows;
use candle_nn::VarBuilder;

use crate::frozen_linear::linear;

/// `y = x w^T + bias` for flat rows, plus what a low-rank adapter adds. Rows are flat because a matmul with a batch dimension
/// would broadcast the weight, and its gradient, once per batch row.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

/// `scaling * x a^T b^T`.
#[derive(Debug, Clone)]
struct Adapter {
    /// `[rank, inputs]`
    a: Tensor,
    /// `[outputs, rank]`
    b: Tensor,
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
            weight: vb.get((outputs, inputs), "weight")?,
            bias: None,
            adapter: match vb.contains_tensor(LORA_A) {
                true => Some(Adapter::new(inputs, outputs, &vb)?),
                false => None,
            },
        })
    }

    pub(crate) fn with_bias(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let bias = vb.get(outputs, "bias")?;
        Ok(Self {
            bias: Some(bias),
            ..Self::new(inputs, outputs, vb)?
        })
    }

    /// [N, inputs] to [N, outputs].
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = linear(x, &self.weight)?;
        if let Some(bias) = &self.bias {
            y = y.broadcast_add(bias)?;
        }
        match &self.adapter {
            None => Ok(y),
            Some(adapter) => y + adapter.forward(x)?,
        }
    }
}

impl Linear {
    /// Several maps of the same rows `[N, inputs]`, each row by itself: see [`linear_rows`]. No gradient.
    pub(crate) fn forward_rows<const M: usize>(
        maps: [&Self; M],
        x: &Tensor,
    ) -> Result<[Tensor; M]> {
        let mut results = linear_rows(x, &maps.map(|map| &map.weight))?;
        for (map, y) in maps.iter().zip(&mut results) {
            if let Some(bias) = &map.bias {
                *y = y.broadcast_add(&bias.detach())?;
            }
            if let Some(Adapter { a, b, scaling }) = &map.adapter {
                let narrow = linear_rows(x, &[a])?;
                let change = linear_rows(&narrow[0], &[b])?;
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
        let (a, b) = (vb.get_unchecked(LORA_A)?, vb.get_unchecked(LORA_B)?);
        match (a.dims(), b.dims()) {
            (&[rank, i], &[o, r]) if rank == r && (i, o) == (inputs, outputs) => {}
            _ => bail!(
                "{LORA_A} and {LORA_B} have shapes {:?} and {:?}, they must be [rank, {inputs}] and [{outputs}, rank]",
                a.dims(),
                b.dims()
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
        linear(&linear(x, &self.a)?, &self.b)? * self.scaling
    }
}
