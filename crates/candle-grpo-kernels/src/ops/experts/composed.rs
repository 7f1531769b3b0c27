//! The composed twin of [`experts`](crate::experts()).

use candle_core::{Result, Tensor};

use super::{ExpertWeights, check};
use crate::precision::arithmetic_dtype;

/// [`experts`](crate::experts()) in plain Candle operations: every expert computes every row.
pub fn experts(
    x: &Tensor,
    weights: &ExpertWeights,
    chosen: &Tensor,
    gates: &Tensor,
) -> Result<Tensor> {
    check(x, weights, chosen, gates)?;
    unchecked(x, weights, chosen, gates)
}

pub(crate) fn unchecked(
    x: &Tensor,
    weights: &ExpertWeights,
    chosen: &Tensor,
    gates: &Tensor,
) -> Result<Tensor> {
    let wide = arithmetic_dtype(x.dtype());
    let rows = x.to_dtype(wide)?.contiguous()?;
    let (none, gates) = (gates.zeros_like()?, gates.contiguous()?);
    // Starts with NaN where an index is not an expert.
    let is_expert = chosen.lt(weights.weights.len() as u32)?;
    let start = is_expert.where_cond(&none, &(&none + f64::NAN)?)?;
    let mut y = start.sum_keepdim(1)?.broadcast_as(rows.shape())?;
    for (expert, maps) in weights.weights.iter().enumerate() {
        let is_own = chosen.eq(expert as u32)?;
        let own = is_own.to_dtype(wide)?.sum_keepdim(1)?;
        let gate = is_own.where_cond(&gates, &none)?.sum_keepdim(1)?;
        let [of_gate, up, down] = maps.each_ref().map(|weight| weight.to_dtype(wide)?.t());
        let inner = (rows.matmul(&of_gate?)?.silu()? * rows.matmul(&up?)?)?;
        let part = inner.matmul(&down?)?.broadcast_mul(&gate)?;
        // An infinite result of a row that is not the expert's must not make it NaN.
        let is_own = own.broadcast_as(part.shape())?.gt(0.0)?;
        y = (y + is_own.where_cond(&part, &part.zeros_like()?)?)?;
    }
    y.to_dtype(x.dtype())
}
