//! The composed twin of [`swiglu`](crate::swiglu()).

use candle_core::{Result, Tensor};

use crate::precision::arithmetic_dtype;
use crate::swiglu::check;

/// [`swiglu`](crate::swiglu()) in plain Candle operations.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    unchecked(gate, up)
}

pub(crate) fn unchecked(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let wide = arithmetic_dtype(gate.dtype());
    (gate.to_dtype(wide)?.silu()? * up.to_dtype(wide)?)?.to_dtype(gate.dtype())
}
