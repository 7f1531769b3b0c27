//! Expected results of a kernel.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_test_support::{assert_close, numbers};

/// A result, computed in two other ways.
#[derive(Debug)]
pub struct Expected {
    /// The result of the formula or of the composed twin, in f64.
    pub exact: Vec<f64>,
    /// The result of the CPU path, in the dtype of the kernel.
    pub on_cpu: Vec<f64>,
}

impl Expected {
    /// Pairs the results of both ways.
    pub fn all(
        exact: impl IntoIterator<Item = Vec<f64>>,
        on_cpu: impl IntoIterator<Item = Vec<f64>>,
    ) -> Vec<Self> {
        let pairs = exact.into_iter().zip(on_cpu);
        pairs
            .map(|(exact, on_cpu)| Self { exact, on_cpu })
            .collect()
    }

    /// Returns [`forward_and_backward`] of an operator, and of its twin in f64.
    ///
    /// # Errors
    ///
    /// Fails if the operator or the twin fails.
    pub fn from_twin(
        inputs: &[Tensor],
        gradient: &Tensor,
        composed: impl Fn(&[Var]) -> Result<Tensor>,
        operator: impl Fn(&[Var]) -> Result<Tensor>,
    ) -> Result<Vec<Self>> {
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        let wide_inputs = inputs.iter().map(wide).collect::<Result<Vec<_>>>()?;
        let exact = forward_and_backward(&wide_inputs, &wide(gradient)?, composed)?;
        let on_cpu = forward_and_backward(inputs, gradient, operator)?;
        Ok(Self::all(exact, on_cpu))
    }

    /// Compares `found` with the exact result, and with the rounded one at twice the `tolerance`.
    ///
    /// # Panics
    ///
    /// Panics if `found` differs by more.
    #[track_caller]
    pub fn assert_close(&self, found: &[f64], tolerance: f64) {
        assert_close(found, &self.exact, tolerance);
        assert_close(found, &self.on_cpu, 2.0 * tolerance);
    }
}

/// Returns the result of an operator, and the gradient of each input for a `gradient` of the
/// result.
///
/// # Errors
///
/// Fails if the operator fails or an input has no gradient.
pub fn forward_and_backward(
    inputs: &[Tensor],
    gradient: &Tensor,
    operator: impl Fn(&[Var]) -> Result<Tensor>,
) -> Result<Vec<Vec<f64>>> {
    let inputs = inputs
        .iter()
        .map(Var::from_tensor)
        .collect::<Result<Vec<_>>>()?;
    let result = operator(&inputs)?;
    let store = (&result * gradient)?.sum_all()?.backward()?;
    let gradients = inputs.iter().map(|input| match store.get(input) {
        Some(gradient) => numbers(gradient),
        None => candle_core::bail!("an input has no gradient"),
    });
    std::iter::once(numbers(&result)).chain(gradients).collect()
}
