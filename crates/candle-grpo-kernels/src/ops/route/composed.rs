//! The composed twin of [`route`](crate::route()).

use candle_core::{D, Result, Tensor};

use super::{check_logits, expert_gates};

/// [`route`](crate::route()) in plain Candle operations. On a GPU, equal logits are in any order.
pub fn route(logits: &Tensor, top_k: usize, normalize: bool) -> Result<(Tensor, Tensor)> {
    check_logits(logits, top_k)?;
    unchecked(&logits.detach().contiguous()?, top_k, normalize)
}

pub(crate) fn unchecked(
    logits: &Tensor,
    top_k: usize,
    normalize: bool,
) -> Result<(Tensor, Tensor)> {
    let order = logits.arg_sort_last_dim(false)?;
    let experts = order.narrow(D::Minus1, 0, top_k)?.contiguous()?;
    let gates = expert_gates(logits, &experts, top_k, normalize)?;
    Ok((experts, gates))
}
