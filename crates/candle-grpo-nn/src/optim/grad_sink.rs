//! Where a backward pass without a graph adds its gradients.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_kernels::{
    add_bias_gradient, add_embedding_gradient, add_matmul, arithmetic_dtype, matmul,
};

use super::gradients::beside;
use crate::model::named_weight::NamedWeight;
use crate::optim::reduction::Reduction;
use crate::{Gradients, Parameters};

/// Adds gradients for trained weights to [`Gradients`], in place. It does not compute gradients for
/// other weights.
///
/// A new sum is f32, or f64 for f64, whatever the pass computes in. That of a product may be in
/// the dtype of the [gradients](crate::optim::GradientDType).
pub(crate) struct GradSink<'a> {
    trained: &'a Parameters,
    gradients: &'a mut Gradients,
    /// In a joined decoder, the sinks for the adapters after the first.
    others: Vec<Self>,
}

impl<'a> GradSink<'a> {
    pub(crate) fn new(trained: &'a Parameters, gradients: &'a mut Gradients) -> Self {
        Self {
            trained,
            gradients,
            others: Vec::new(),
        }
    }

    /// Creates a sink for each of a joined decoder's adapters. `None` without any.
    pub(crate) fn joined(
        trained: impl IntoIterator<Item = (&'a Parameters, &'a mut Gradients)>,
    ) -> Option<Self> {
        let mut sinks = trained.into_iter().map(|(own, sums)| Self::new(own, sums));
        let first = sinks.next()?;
        Some(Self {
            others: sinks.collect(),
            ..first
        })
    }

    /// Returns the sink for the adapter with this index.
    pub(crate) fn of_adapter(&mut self, adapter: usize) -> Result<&mut Self> {
        let sinks = 1 + self.others.len();
        match adapter.checked_sub(1) {
            None => Ok(self),
            Some(other) => match self.others.get_mut(other) {
                Some(sink) => Ok(sink),
                None => bail!("trained: {sinks} sets of adapters, must be more than {adapter}"),
            },
        }
    }

    /// Adds the result of `gradient` if `weight` trains.
    pub(crate) fn add(
        &mut self,
        weight: &NamedWeight,
        gradient: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        let Some(variable) = self.trained.get(&weight.name) else {
            return Ok(());
        };
        let gradient = gradient()?.to_dtype(arithmetic_dtype(variable.dtype()))?;
        self.gradients.add(&weight.name, &gradient)
    }

    /// Adds `a b` if `weight` trains.
    pub(crate) fn add_product(
        &mut self,
        weight: &NamedWeight,
        a: &Tensor,
        b: &Tensor,
    ) -> Result<()> {
        let Some(variable) = self.trained.get(&weight.name) else {
            return Ok(());
        };
        let wide = arithmetic_dtype(a.dtype());
        let is_first = self.gradients.get(&weight.name).is_none();
        let is_sum = self.gradients.sum_dtype(a.dtype()) == a.dtype();
        if is_first && is_sum && arithmetic_dtype(variable.dtype()) == wide {
            // The product itself is the sum. In another dtype it would be rounded.
            self.gradients.insert(&weight.name, matmul(a, b)?);
            return Ok(());
        }
        match self.sum(weight)? {
            Some(sum) if [a.dtype(), wide].contains(&sum.dtype()) => add_matmul(sum, a, b),
            Some(_) => self.add(weight, || matmul(a, b)),
            None => Ok(()),
        }
    }

    /// Adds each row in `gradient` to the row in `weight` with its id, if `weight` trains.
    pub(crate) fn add_rows(
        &mut self,
        weight: &NamedWeight,
        ids: &Tensor,
        gradient: &Tensor,
    ) -> Result<()> {
        match self.sum(weight)? {
            Some(sum) => add_embedding_gradient(sum, ids, &beside(sum.dtype(), gradient)?),
            None => Ok(()),
        }
    }

    /// Adds the row sum of `gradient` if `bias` trains.
    pub(crate) fn add_bias(&mut self, bias: &NamedWeight, gradient: &Tensor) -> Result<()> {
        match self.sum(bias)? {
            Some(sum) => add_bias_gradient(sum, &beside(sum.dtype(), gradient)?),
            None => Ok(()),
        }
    }

    /// Declares that the gradients whose names `is_final` selects are final in this backward pass.
    pub(crate) fn complete(&mut self, is_final: impl Fn(&str) -> bool) -> Result<()> {
        let others = self.others.iter_mut().map(|other| &mut other.gradients);
        let mut all = others.chain([&mut self.gradients]);
        all.try_for_each(|gradients| gradients.complete(&is_final))
    }

    /// The sums over all ranks, as [`Gradients::reduction`].
    pub(crate) fn reduction(&mut self) -> Option<&mut Reduction> {
        self.gradients.reduction()
    }

    /// Returns the gradient sum for `weight` so far, initially zero, if `weight` trains.
    fn sum(&mut self, weight: &NamedWeight) -> Result<Option<&Tensor>> {
        let tensor = &weight.tensor;
        if self.gradients.get(&weight.name).is_none() {
            self.add(weight, || {
                Tensor::zeros(tensor.shape(), DType::F32, tensor.device())
            })?;
        }
        Ok(self.gradients.get(&weight.name))
    }
}
