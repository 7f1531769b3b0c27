//! Backward passes through Candle's graph.

use candle_core::{Result, Tensor, Var};

/// Returns detached gradients with respect to `inputs`, given the gradient of `forward(inputs)`.
pub(crate) fn gradients<const N: usize>(
    inputs: [&Tensor; N],
    gradient: &Tensor,
    forward: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<[Tensor; N]> {
    let variables = inputs
        .iter()
        .map(|input| Var::from_tensor(&input.detach()))
        .collect::<Result<Vec<_>>>()?;
    let result = forward(std::array::from_fn(|i| variables[i].as_tensor()))?;
    let store = (result * gradient.detach())?.sum_all()?.backward()?;
    let found = variables
        .iter()
        .map(|variable| match store.get(variable) {
            Some(gradient) => Ok(gradient.detach()),
            None => variable.zeros_like(),
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(std::array::from_fn(|i| found[i].clone()))
}
