//! The composed twins of [`swiglu`](crate::swiglu()) and [`geglu`](crate::geglu()).

use candle_core::{Result, Tensor};

use super::{Activation, check};
use crate::precision::arithmetic_dtype;

/// [`swiglu`](crate::swiglu()) in plain Candle operations.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    unchecked(gate, up, Activation::Silu)
}

/// [`geglu`](crate::geglu()) in plain Candle operations.
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    unchecked(gate, up, Activation::GeluTanh)
}

pub(crate) fn unchecked(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let wide = arithmetic_dtype(gate.dtype());
    let x = gate.to_dtype(wide)?;
    let activated = match activation {
        Activation::Silu => x.silu()?,
        Activation::GeluTanh => {
            // Candle's gradient of gelu has six digits.
            let cube = (x.sqr()? * &x)?;
            let inner = ((&x + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            ((inner.tanh()? + 1.0)? * (x * 0.5)?)?
        }
    };
    (activated * up.to_dtype(wide)?)?.to_dtype(gate.dtype())
}
