//! Log-probs of tokens from hidden states and the output weight.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::result_dtype;

use crate::log_prob::{TokenLogProbs, token_log_probs};

/// [`token_log_probs`] of `logits = hidden weight^T + bias`: `hidden` `[.., H]`, `weight` `[V, H]`, `bias` `[V]`,
/// `targets` `[..]`. The product is taken in f32 (f64 for f64 hidden states) whatever the dtypes are.
pub fn linear_token_log_probs(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let &[vocab, width] = weight.dims() else {
        bail!("weight: shape {:?}, must be [V, H]", weight.dims());
    };
    let Some((&last, outer)) = hidden.dims().split_last() else {
        bail!("hidden: a scalar, must be [.., {width}]");
    };
    if last != width {
        bail!(
            "hidden: shape {:?}, the last dimension must be that of weight, {width}",
            hidden.dims()
        );
    }
    let dtype = result_dtype(hidden.dtype());
    let rows = outer.iter().product::<usize>();
    let flat = hidden.to_dtype(dtype)?.reshape((rows, width))?;
    let mut logits = flat.matmul(&weight.to_dtype(dtype)?.t()?)?;
    if let Some(bias) = bias {
        if bias.dims() != [vocab] {
            bail!("bias: shape {:?}, must be [{vocab}]", bias.dims());
        }
        logits = logits.broadcast_add(&bias.to_dtype(dtype)?)?;
    }
    let shape = [outer, &[vocab]].concat();
    token_log_probs(&logits.reshape(shape)?, targets, temperature)
}
