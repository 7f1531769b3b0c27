//! The layer that turns hidden states into logits.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::arithmetic_dtype;
use candle_grpo_core::validate::positive;
use candle_grpo_kernels::soft_cap;

/// Hidden states and the layer that turns them into logits:
/// `soft_cap(logit_scale (hidden weight^T + bias))`.
#[derive(Debug, Clone, Copy)]
pub struct OutputLayer<'a> {
    /// Hidden states, `[B, T, H]`.
    pub hidden: &'a Tensor,
    /// Output weight, `[V, H]`.
    pub weight: &'a Tensor,
    /// Output bias, `[V]`.
    pub bias: Option<&'a Tensor>,
    /// Factor of the logits.
    pub logit_scale: f64,
    /// Bound of the logits, see [`soft_cap`].
    pub logit_cap: Option<f64>,
}

impl<'a> OutputLayer<'a> {
    /// A layer without bias, factor and bound.
    pub fn new(hidden: &'a Tensor, weight: &'a Tensor) -> Self {
        Self {
            hidden,
            weight,
            bias: None,
            logit_scale: 1.,
            logit_cap: None,
        }
    }

    /// Returns the logits `[.., V]` of `hidden` `[.., H]` in the dtype of arithmetic. Errors have
    /// the `name` of the model.
    pub(super) fn logits(&self, name: &str, hidden: &Tensor) -> Result<Tensor> {
        positive(&format!("{name}.logit_scale"), self.logit_scale)?;
        let (vocabulary, width) = match (hidden.dims(), self.weight.dims()) {
            (&[.., h], &[v, width]) if h == width && v > 0 => (v, width),
            (hidden, weight) => {
                bail!("{name}: hidden {hidden:?} and weight {weight:?}, must be [.., H] and [V, H]")
            }
        };
        let dtype = arithmetic_dtype(hidden.dtype());
        let mut shape = hidden.dims().to_vec();
        shape[hidden.rank() - 1] = vocabulary;
        let mut z = hidden
            .reshape(((), width))?
            .to_dtype(dtype)?
            .matmul(&self.weight.to_dtype(dtype)?.t()?)?;
        if let Some(bias) = self.bias {
            z = z.broadcast_add(&bias.to_dtype(dtype)?)?;
        }
        soft_cap(&(z.reshape(shape)? * self.logit_scale)?, self.logit_cap)
    }
}
