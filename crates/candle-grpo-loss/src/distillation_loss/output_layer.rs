//! The layer that turns hidden states into logits.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::validate::positive;
use candle_grpo_kernels::{add_matmul, soft_cap};

/// Hidden states, with the layer that turns them into logits:
/// `soft_cap(logit_scale (hidden weight^T + bias))`.
#[derive(Debug, Clone, Copy)]
pub struct OutputLayer<'a> {
    /// Hidden states, `[B, T, H]`.
    pub hidden: &'a Tensor,
    /// Output weight, `[V, H]`.
    pub weight: &'a Tensor,
    /// Output bias, `[V]`.
    pub bias: Option<&'a Tensor>,
    /// Factor for the logits.
    pub logit_scale: f64,
    /// Bound for the logits, see [`soft_cap`].
    pub logit_cap: Option<f64>,
}

impl<'a> OutputLayer<'a> {
    /// Creates a layer without bias, factor or bound.
    pub fn new(hidden: &'a Tensor, weight: &'a Tensor) -> Self {
        Self {
            hidden,
            weight,
            bias: None,
            logit_scale: 1.,
            logit_cap: None,
        }
    }

    /// Checks the options for hidden states with this width. Errors use the model's `name`.
    pub(super) fn check(&self, name: &str, width: usize) -> Result<()> {
        positive(&format!("{name}.logit_scale"), self.logit_scale)?;
        match *self.weight.dims() {
            [v, h] if h == width && v > 0 => {}
            ref dims => bail!("{name}.weight: shape {dims:?}, must be [V, {width}]"),
        }
        match self.bias.map(Tensor::dims) {
            Some(dims) if dims != &self.weight.dims()[..1] => bail!(
                "{name}.bias: shape {dims:?}, must be [{}]",
                self.weight.dims()[0]
            ),
            _ => Ok(()),
        }
    }

    /// Returns the logits for `products` `[.., V]` (hidden states times weight).
    pub(super) fn logits(&self, products: &Tensor) -> Result<Tensor> {
        let mut logits = match self.bias {
            Some(bias) => products.broadcast_add(&bias.to_dtype(products.dtype())?)?,
            None => products.clone(),
        };
        if self.logit_scale != 1. {
            logits = (logits * self.logit_scale)?;
        }
        soft_cap(&logits, self.logit_cap)
    }
}

/// Multiplies hidden states `[N, H]` by a weight `[V, H]`: `[N, V]` in the arithmetic dtype,
/// without a gradient.
pub(super) fn products(hidden: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (hidden, weight) = same_dtype(hidden, weight)?;
    let shape = (hidden.dim(0)?, weight.dim(0)?);
    let dtype = arithmetic_dtype(hidden.dtype());
    let products = Tensor::zeros(shape, dtype, hidden.device())?;
    add_matmul(&products, &hidden, &weight.t()?)?;
    Ok(products)
}

/// Returns both detached: in their shared dtype, or in the arithmetic dtype if theirs differ. Also
/// converts f16, which cannot hold logit gradients.
pub(super) fn same_dtype(hidden: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
    if hidden.dtype() == weight.dtype() && hidden.dtype() != DType::F16 {
        return Ok((hidden.detach(), weight.detach()));
    }
    let dtype = arithmetic_dtype(hidden.dtype());
    let convert = |x: &Tensor| x.detach().to_dtype(dtype);
    Ok((convert(hidden)?, convert(weight)?))
}
