//! The sum of squared probabilities, which the optimal token baseline needs.

use candle_core::{D, Result, Tensor, bail};
use candle_grpo_core::arithmetic_dtype;

use crate::limits::check_positive;

/// The sum over the vocabulary of the squared probabilities of `softmax(logits / temperature)`: `[.., V]` to `[..]`.
/// The optimal token baseline needs it.
pub fn sum_of_squared_probs(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    check_positive("temperature", temperature)?;
    if logits.rank() == 0 || logits.elem_count() == 0 {
        bail!("logits: shape {:?}, must be [.., V]", logits.dims());
    }
    let z = (logits.to_dtype(arithmetic_dtype(logits.dtype()))? / temperature)?;
    // Relative to the largest logit, so that nothing overflows.
    let largest = z.detach().max_keepdim(D::Minus1)?;
    let weights = z.broadcast_sub(&largest)?.exp()?;
    let total = weights.sum_keepdim(D::Minus1)?;
    weights.broadcast_div(&total)?.sqr()?.sum(D::Minus1)
}
