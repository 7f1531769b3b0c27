//! Where a backward pass without a graph leaves the gradients of weights.

use candle_core::{DType, Result, Tensor};
use candle_grpo_kernels::{add_embedding_gradient, add_matmul};

use crate::model::named_weight::NamedWeight;
use crate::{Gradients, Parameters};

/// Adds gradients of the weights that train to [`Gradients`], in place; for others it costs nothing.
pub(crate) struct GradSink<'a> {
    trained: &'a Parameters,
    gradients: &'a mut Gradients,
}

impl<'a> GradSink<'a> {
    pub(crate) fn new(trained: &'a Parameters, gradients: &'a mut Gradients) -> Self {
        Self { trained, gradients }
    }

    /// Adds what `gradient` computes, if `weight` trains.
    pub(crate) fn add(
        &mut self,
        weight: &NamedWeight,
        gradient: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        if self.trained.get(&weight.name).is_none() {
            return Ok(());
        }
        self.gradients.add(&weight.name, &gradient()?)
    }

    /// Adds `a b`, if `weight` trains.
    pub(crate) fn add_product(
        &mut self,
        weight: &NamedWeight,
        a: &Tensor,
        b: &Tensor,
    ) -> Result<()> {
        match self.gradients.get(&weight.name) {
            Some(sum) if a.dtype() != DType::F64 => add_matmul(sum, a, b),
            _ => self.add(weight, || a.matmul(b)),
        }
    }

    /// Adds the rows of `gradient` to those that `ids` name, if `weight` trains.
    pub(crate) fn add_rows(
        &mut self,
        weight: &NamedWeight,
        ids: &Tensor,
        gradient: &Tensor,
    ) -> Result<()> {
        if self.gradients.get(&weight.name).is_none() {
            self.add(weight, || weight.tensor.zeros_like())?;
        }
        match self.gradients.get(&weight.name) {
            Some(sum) => add_embedding_gradient(sum, ids, &narrow(gradient)?),
            None => Ok(()),
        }
    }
}

/// f64 becomes f32, as sums are.
fn narrow(gradient: &Tensor) -> Result<Tensor> {
    match gradient.dtype() {
        DType::F64 => gradient.to_dtype(DType::F32),
        _ => Ok(gradient.clone()),
    }
}
