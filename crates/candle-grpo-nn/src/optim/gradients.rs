//! Gradients summed over micro-batches.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_collective::Collective;
use candle_grpo_kernels::{
    arithmetic_dtype, ensure_gradients, ensure_reached, scale_gradients, squared_gradient_norms,
};

use super::reduction::Reduction;
use super::shard::Shard;
use crate::Parameters;

/// One gradient for each variable, summed over micro-batches.
///
/// The gradients are detached. Candle's own `GradStore` keeps the forward graph alive.
#[derive(Debug, Default)]
pub struct Gradients {
    by_name: BTreeMap<String, Tensor>,
    /// The sum over all ranks that the current backward pass feeds.
    reduction: Option<Reduction>,
    /// The part of each gradient that has the sum over all ranks, if not all of it.
    shard: Option<Shard>,
}

impl Gradients {
    /// An empty set of gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs backward from `loss`, a tensor of one element, and adds the gradient of every variable.
    ///
    /// # Errors
    ///
    /// If a variable receives no gradient, because an operator breaks the graph or the variable is
    /// not used. The error lists the names. Nothing has been added then.
    pub fn accumulate(&mut self, loss: &Tensor, parameters: &Parameters) -> Result<()> {
        if loss.elem_count() != 1 || !loss.dtype().is_float() {
            bail!(
                "loss: shape {:?} and dtype {:?}, must be one floating-point number",
                loss.dims(),
                loss.dtype()
            );
        }
        let mut store = loss.backward()?;
        ensure_gradients(&store, parameters.iter())?;
        let mut received = BTreeMap::new();
        for (name, variable) in parameters.iter() {
            if let Some(gradient) = store.remove(variable) {
                received.insert(name.to_owned(), gradient.detach().contiguous()?);
            }
        }
        drop(store);
        if !self.by_name.is_empty() {
            if let Some(name) = self
                .by_name
                .keys()
                .find(|name| !received.contains_key(*name))
            {
                bail!("parameters: no {name}, must have it as the earlier backward passes");
            }
            for (name, gradient) in &mut received {
                let Some(sum) = self.by_name.get(name) else {
                    bail!("parameters: {name}, must be absent as in the earlier backward passes");
                };
                *gradient = (sum + &*gradient)?;
            }
        }
        self.by_name = received;
        Ok(())
    }

    /// Runs backward from `loss`, a tensor of one element, and adds the gradients of the variables
    /// that it reaches.
    ///
    /// Returns the gradients of everything else that was reached. Call [`Self::ensure_complete`]
    /// after the last addition.
    pub fn add_reached(&mut self, loss: &Tensor, parameters: &Parameters) -> Result<GradStore> {
        let mut store = loss.backward()?;
        for (name, variable) in parameters.iter() {
            if let Some(gradient) = store.remove(variable) {
                self.add(name, &gradient)?;
            }
        }
        Ok(store)
    }

    /// Adds a gradient that was computed without Candle's `backward`, of any float dtype. Sums are
    /// in f32, or in f64 if the first gradient of the name is f64.
    ///
    /// The first gradient of a name is stored without a copy if it has the dtype of the sum, and
    /// later ones may be added to it in place.
    pub fn add(&mut self, name: &str, gradient: &Tensor) -> Result<()> {
        let sum = self.by_name.get_mut(name);
        let dtype = match &sum {
            Some(sum) => sum.dtype(),
            None => arithmetic_dtype(gradient.dtype()),
        };
        let gradient = gradient.detach().to_dtype(dtype)?.contiguous()?;
        match sum {
            None => {
                self.by_name.insert(name.to_owned(), gradient);
            }
            Some(sum) if sum.dims() == gradient.dims() => *sum = (&*sum + gradient)?,
            Some(sum) => bail!(
                "gradient of {name}: shape {:?}, must be that of the earlier one, {:?}",
                gradient.dims(),
                sum.dims()
            ),
        }
        Ok(())
    }

    /// Sums the gradients over all ranks, from the next backward pass on, which must be the last of
    /// the optimizer step. A block's gradients are summed while the pass computes those of the
    /// blocks before it. [`Self::finish_reduction`] waits for the sums.
    ///
    /// All ranks must have gradients of the same names and shapes. With one rank this does nothing.
    ///
    /// With `scatter` a rank receives the sums of its part only, for an optimizer with
    /// [`AdamW::sharded`](crate::AdamW::sharded). Norms are those of all parts; all ranks must then
    /// compute them.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn begin_reduction(
        &mut self,
        collective: &Arc<dyn Collective>,
        scatter: bool,
    ) -> Result<()> {
        if collective.world_size() > 1 {
            let shard = Shard(Arc::clone(collective));
            self.shard = scatter.then(|| shard.clone());
            self.reduction = Some(Reduction::start(shard, scatter)?);
        }
        Ok(())
    }

    /// Declares that the backward pass has added the last gradient of each name that `is_final`
    /// selects.
    pub(crate) fn complete(&mut self, is_final: impl Fn(&str) -> bool) -> Result<()> {
        if let Some(reduction) = &mut self.reduction {
            for (name, gradient) in self.by_name.iter().filter(|(name, _)| is_final(name)) {
                reduction.add(name, gradient)?;
            }
        }
        Ok(())
    }

    /// Waits until the gradients are those of all ranks. Does nothing without
    /// [`Self::begin_reduction`].
    ///
    /// # Errors
    ///
    /// If a rank has ended. The gradients are then partly summed and must be cleared.
    pub fn finish_reduction(&mut self) -> Result<()> {
        self.complete(|_| true)?;
        match self.reduction.take() {
            Some(reduction) => reduction.finish(),
            None => Ok(()),
        }
    }

    /// Checks that all variables of `parameters` have a gradient. The error lists the names of
    /// those that have none.
    pub fn ensure_complete(&self, parameters: &Parameters) -> Result<()> {
        let names = parameters.iter().map(|(name, _)| name);
        ensure_reached(names.map(|name| (name, self.by_name.contains_key(name))))
    }

    /// Computes the Euclidean norm of all gradients together; 0 if there are none. Synchronizes
    /// with the device.
    ///
    /// # Errors
    ///
    /// If the sum of the squares of a gradient, computed in f64, exceeds f32, in which the
    /// optimizer squares it. The error names the first such gradient.
    pub fn global_norm(&self) -> Result<f64> {
        let sums = self.squared_norms()?;
        if let Some((name, sum)) = self.first_not_finite(&sums) {
            bail!("gradient of {name}: not finite, its squares sum to {sum}");
        }
        Ok(sums.iter().sum::<f64>().sqrt())
    }

    /// Returns the name of the first gradient for which [`Self::global_norm`] is an error.
    pub fn not_finite(&self) -> Result<Option<&str>> {
        let sums = self.squared_norms()?;
        Ok(self.first_not_finite(&sums).map(|(name, _)| name))
    }

    fn squared_norms(&self) -> Result<Vec<f64>> {
        let Some(shard) = &self.shard else {
            return squares(&self.by_name.values().collect::<Vec<_>>());
        };
        let parts = self.by_name.values().map(|gradient| shard.own(gradient));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let sums = |i: usize| squares(&parts.iter().map(|part| &part[i]).collect::<Vec<_>>());
        let own = Tensor::new(sums(0)?, &Device::Cpu)?;
        shard.0.all_reduce_sum(&[&own])?;
        let remainders = sums(1)?.into_iter();
        Ok(remainders
            .zip(own.to_vec1::<f64>()?)
            .map(|(a, b)| a + b)
            .collect())
    }

    fn first_not_finite(&self, squared_norms: &[f64]) -> Option<(&str, f64)> {
        let mut named = self.by_name.keys().zip(squared_norms);
        named
            .find(|&(_, &sum)| !(sum as f32).is_finite())
            .map(|(name, &sum)| (name.as_str(), sum))
    }

    /// Returns the norm of all gradients together, and the factor
    /// `min(1, max_norm / (norm + 1e-6))` of clipping, as `torch.nn.utils.clip_grad_norm_` has it.
    ///
    /// # Errors
    ///
    /// If `max_norm` is not positive (infinity disables clipping), or as in [`Self::global_norm`].
    pub fn clip_factor(&self, max_norm: f64) -> Result<(f64, f64)> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            bail!("max_norm: {max_norm}, must be positive");
        }
        let norm = self.global_norm()?;
        Ok((norm, (max_norm / (norm + 1e-6)).min(1.0)))
    }

    /// Scales all gradients in place by the factor of [`Self::clip_factor`]. Returns the norm
    /// before scaling.
    ///
    /// # Errors
    ///
    /// As in [`Self::clip_factor`].
    pub fn clip_by_global_norm(&mut self, max_norm: f64) -> Result<f64> {
        let (norm, factor) = self.clip_factor(max_norm)?;
        if factor < 1.0 {
            scale_gradients(&self.by_name.values().collect::<Vec<_>>(), factor)?;
        }
        Ok(norm)
    }

    /// Multiplies all gradients by `factor`. Gradients that are added later are not scaled.
    ///
    /// # Errors
    ///
    /// If the device has no memory for one more gradient.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        for gradient in self.by_name.values_mut() {
            *gradient = (&*gradient * factor)?;
        }
        Ok(())
    }

    /// The gradient of the variable with this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// Names and gradients, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name
            .iter()
            .map(|(name, gradient)| (name.as_str(), gradient))
    }

    /// Returns whether there are no gradients.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Removes all gradients, to start the next step.
    pub fn clear(&mut self) {
        self.reduction = None;
        self.shard = None;
        self.by_name.clear();
    }
}

/// The sum of the squares of each gradient.
fn squares(gradients: &[&Tensor]) -> Result<Vec<f64>> {
    // Converted on the host, as not every device has f64.
    squared_gradient_norms(gradients)?
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()
}
