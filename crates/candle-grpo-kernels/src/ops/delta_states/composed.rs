//! The composed twin of [`DeltaStates`](crate::DeltaStates).

use candle_core::{Result, Tensor};

use crate::ops::gated_delta_rule::composed::Rows;
use crate::{DeltaHeads, SlotRows};

/// Returns the convolution of `x`, and advances `windows` `[slots, taps - 1, channels]`.
pub(crate) fn causal_conv(
    windows: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    batch: &[SlotRows],
) -> Result<Tensor> {
    let wide = windows.dtype();
    let (_, taps) = weight.dims2()?;
    let weight = weight.to_dtype(wide)?.t()?;
    let mut results = Vec::with_capacity(batch.len());
    let mut first = 0;
    for &SlotRows { slot, rows } in batch {
        let mut all = x.narrow(0, first, rows)?.to_dtype(wide)?;
        if taps > 1 {
            all = Tensor::cat(&[windows.get(slot)?, all], 0)?;
            let window = all.narrow(0, rows, taps - 1)?.unsqueeze(0)?.copy()?;
            windows.slice_set(&window, 0, slot)?;
        }
        let mut sum = all
            .narrow(0, 0, rows)?
            .broadcast_mul(&weight.narrow(0, 0, 1)?)?;
        for tap in 1..taps {
            let rows = all.narrow(0, tap, rows)?;
            sum = (sum + rows.broadcast_mul(&weight.narrow(0, tap, 1)?)?)?;
        }
        results.push(sum.silu()?);
        first += rows;
    }
    Tensor::cat(&results, 0)?.to_dtype(x.dtype())
}

/// Returns each row's result, and advances `states` `[slots, value_heads, key_dim, value_dim]`.
pub(crate) fn gated_delta_rule(
    states: &Tensor,
    [qkv, g, beta]: [&Tensor; 3],
    heads: DeltaHeads,
    batch: &[SlotRows],
) -> Result<Tensor> {
    let inputs = Rows::new(qkv, g, beta, heads)?;
    let mut results = Vec::new();
    let mut first = 0;
    for &SlotRows { slot, rows } in batch {
        let mut state = states.get(slot)?;
        for row in first..first + rows {
            let (o, next) = inputs.row(row, &state)?;
            results.push(o);
            state = next;
        }
        states.slice_set(&state.unsqueeze(0)?.contiguous()?, 0, slot)?;
        first += rows;
    }
    Tensor::cat(&results, 0)?.to_dtype(qkv.dtype())
}
