//! Summed squared probabilities, an input for the optimal token baseline.

use candle_core::{D, Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;

use crate::softmax::{check_temperature, log_softmax};

/// Squares the probabilities in `softmax(logits / temperature)` and sums them over the vocabulary:
/// `[.., V]` to `[..]`.
///
/// It is an input for the optimal token baseline.
///
/// # Errors
///
/// Fails if the temperature is outside [`candle_grpo_kernels::TEMPERATURES`], or if the logits are
/// empty.
pub fn sum_of_squared_probs(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    check_temperature(temperature)?;
    if logits.rank() == 0 || logits.elem_count() == 0 {
        bail!("logits: shape {:?}, must be [.., V]", logits.dims());
    }
    let z = (logits.to_dtype(arithmetic_dtype(logits.dtype()))? / temperature)?;
    log_softmax(&z)?.exp()?.sqr()?.sum(D::Minus1)
}
