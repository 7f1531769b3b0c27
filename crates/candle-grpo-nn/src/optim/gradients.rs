//! Gradients summed over micro-batches.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_grpo_collective::Collective;
use candle_grpo_kernels::{
    arithmetic_dtype, ensure_gradients, ensure_reached, scale_gradients, squared_gradient_norms,
};

use super::reduction::{BUCKET, Kept, Reduction, Sums};
use serde::{Deserialize, Serialize};

use crate::Parameters;
use crate::weights::shard::Shard;

/// The dtype of the [sums of gradients](Gradients) of the matrices in a decoder's layers.
///
/// Other gradients are always summed in f32: those of the embedding, the output layer, biases and
/// norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GradientDType {
    /// f32: 4 bytes a parameter.
    #[default]
    F32,
    /// bf16: 2 bytes a parameter, in a pass that computes in bf16. Products are added in f32, and
    /// each sum is rounded once for each micro-batch, to the nearest number.
    ///
    /// Choose it where f32 does not fit. An optimizer step should have at most some hundred
    /// micro-batches: what is below 1/512 of a sum is lost.
    Bf16,
}

/// One gradient per variable, summed over micro-batches.
///
/// The gradients are detached. Candle's own `GradStore` would keep the forward graph alive.
#[derive(Debug, Default)]
pub struct Gradients {
    /// The dtype of sums of matrix products.
    dtype: GradientDType,
    /// The reduction over all ranks that the current backward pass feeds. Dropped before the
    /// gradients that it sums.
    reduction: Option<Reduction>,
    by_name: BTreeMap<String, Tensor>,
    /// This rank's part, if only that part of each gradient is summed over all ranks.
    shard: Option<Shard>,
    /// The sums over ranks and passes, if each rank keeps its part alone. The other fields then
    /// have the gradients of the current pass.
    kept: Kept,
    /// Sums are computed in turn with the backward pass.
    reduces_in_turn: bool,
}

impl Gradients {
    /// Creates an empty set. All sums will be f32, or f64 for f64.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty set in which the sums for matrices in a decoder's layers will be in
    /// `dtype`.
    ///
    /// ```
    /// use candle_grpo_nn::Gradients;
    /// use candle_grpo_nn::optim::GradientDType;
    ///
    /// let gradients = Gradients::with_dtype(GradientDType::Bf16);
    /// assert!(gradients.is_empty());
    /// ```
    pub fn with_dtype(dtype: GradientDType) -> Self {
        Self {
            dtype,
            ..Self::default()
        }
    }

    /// The dtype of the sum of products of `dtype`.
    pub(crate) fn sum_dtype(&self, dtype: DType) -> DType {
        match (self.dtype, dtype) {
            (GradientDType::Bf16, DType::BF16) => DType::BF16,
            _ => arithmetic_dtype(dtype),
        }
    }

    /// Stores the first gradient for this name as its sum.
    pub(crate) fn insert(&mut self, name: &str, gradient: Tensor) {
        self.by_name.insert(name.to_owned(), gradient);
    }

    /// Runs backward from `loss`, a tensor with one element, and adds every variable's gradient.
    ///
    /// # Errors
    ///
    /// If a variable receives no gradient, because an operator breaks the graph or nothing uses the
    /// variable. The error lists the names. In that case nothing has been added.
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

    /// Runs backward from `loss`, a tensor with one element, and adds gradients for the variables
    /// that it reaches.
    ///
    /// Returns the gradients for everything else that was reached. Call [`Self::ensure_complete`]
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

    /// Adds a gradient that was computed without Candle's `backward`, in any float dtype. A new sum
    /// is f32, or f64 if the gradient is f64.
    ///
    /// The first gradient for a name is stored without a copy if it already has the sum's dtype.
    /// Later ones may then be added to it in place.
    pub fn add(&mut self, name: &str, gradient: &Tensor) -> Result<()> {
        let sum = self.by_name.get_mut(name);
        let dtype = match &sum {
            Some(sum) => sum.dtype(),
            None => arithmetic_dtype(gradient.dtype()),
        };
        let gradient = gradient.detach().to_dtype(dtype)?.contiguous()?;
        match sum {
            None => self.insert(name, gradient),
            Some(sum) if sum.dims() == gradient.dims() => *sum = (&*sum + gradient)?,
            Some(sum) => bail!(
                "gradient of {name}: shape {:?}, must be that of the earlier one, {:?}",
                gradient.dims(),
                sum.dims()
            ),
        }
        Ok(())
    }

    /// Sums the gradients over all ranks, starting with the next backward pass, which must be the
    /// last in the optimizer step. A block's gradients are summed while the pass computes those for
    /// earlier blocks. [`Self::finish_reduction`] waits for the sums.
    ///
    /// All ranks must have gradients with the same names and shapes. With one rank this does
    /// nothing. If ranks divide an optimizer, begin with
    /// [`AdamW::begin_reduction`](crate::AdamW::begin_reduction).
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn begin_reduction(&mut self, collective: &Arc<dyn Collective>) -> Result<()> {
        if collective.world_size() > 1 {
            self.begin(Sums::Whole(Arc::clone(collective)))?;
        }
        Ok(())
    }

    /// Sets whether the next reductions run on the thread of the backward pass, in turn with its
    /// own operations, and not on another one at the same time. A backward pass in which ranks
    /// communicate, as over [divided tokens](crate::PackedTokens::divided), needs this: ranks must
    /// call all operations in one order.
    pub fn reduce_in_turn(&mut self, in_turn: bool) {
        self.reduces_in_turn = in_turn;
    }

    pub(super) fn begin(&mut self, sums: Sums) -> Result<()> {
        // Finishes an earlier pass first: its kept sums are the start of this one.
        self.finish_reduction()?;
        self.shard = match &sums {
            Sums::Whole(_) => None,
            Sums::Parts(shard) | Sums::Divided(shard) => Some(shard.clone()),
        };
        self.reduction = Some(Reduction::start(
            sums,
            std::mem::take(&mut self.kept),
            BUCKET,
            self.reduces_in_turn,
        )?);
        Ok(())
    }

    /// Declares that the backward pass has added the last gradient for each name that `is_final`
    /// selects.
    pub(crate) fn complete(&mut self, is_final: impl Fn(&str) -> bool) -> Result<()> {
        let Some(reduction) = &mut self.reduction else {
            return Ok(());
        };
        if reduction.frees() {
            let all = std::mem::take(&mut self.by_name).into_iter();
            let (done, rest): (BTreeMap<_, _>, _) = all.partition(|(name, _)| is_final(name));
            self.by_name = rest;
            for (name, gradient) in done {
                reduction.add(&name, gradient)?;
            }
            return reduction.send_full();
        }
        for (name, gradient) in self.by_name.iter().filter(|(name, _)| is_final(name)) {
            reduction.add(name, gradient.clone())?;
        }
        Ok(())
    }

    /// The reduction that the current backward pass feeds, to call other operations of all ranks in
    /// an order with its sums that is the same on all ranks.
    pub(crate) fn reduction(&mut self) -> Option<&mut Reduction> {
        self.reduction.as_mut()
    }

    /// Waits until the gradients are summed over all ranks. Does nothing without
    /// [`Self::begin_reduction`].
    ///
    /// # Errors
    ///
    /// If a rank has ended. The gradients are then partly summed and must be cleared.
    pub fn finish_reduction(&mut self) -> Result<()> {
        self.complete(|_| true)?;
        if let Some(reduction) = self.reduction.take() {
            self.kept = reduction.finish()?;
        }
        Ok(())
    }

    /// Checks that every variable in `parameters` has a gradient. The error lists the names without
    /// one.
    pub fn ensure_complete(&self, parameters: &Parameters) -> Result<()> {
        let names = parameters.iter().map(|(name, _)| name);
        let has = |name: &str| {
            let mut added = self.reduction.iter();
            self.kind(name).is_some() || added.any(|reduction| reduction.contains(name))
        };
        ensure_reached(names.map(|name| (name, has(name))))
    }

    /// Computes the Euclidean norm over all gradients; 0 if there are none. Synchronizes with the
    /// device.
    ///
    /// # Errors
    ///
    /// If a gradient's sum of squares, computed in f64, exceeds the f32 range, because the
    /// optimizer squares in f32. The error names the first such gradient.
    pub fn global_norm(&self) -> Result<f64> {
        let sums = self.squared_norms()?;
        if let Some((name, sum)) = self.first_not_finite(&sums) {
            bail!("gradient of {name}: not finite, its squares sum to {sum}");
        }
        Ok(sums.iter().sum::<f64>().sqrt())
    }

    /// Returns the first gradient name for which [`Self::global_norm`] fails.
    pub fn not_finite(&self) -> Result<Option<&str>> {
        let sums = self.squared_norms()?;
        Ok(self.first_not_finite(&sums).map(|(name, _)| name))
    }

    fn squared_norms(&self) -> Result<Vec<f64>> {
        let Some(shard) = &self.shard else {
            return squares(&self.by_name.values().collect::<Vec<_>>());
        };
        let parts = self.names().map(|name| self.parts(shard, name));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let sums = |i: usize| squares(&parts.iter().map(|part| &part[i]).collect::<Vec<_>>());
        let own = Tensor::new(sums(0)?, &Device::Cpu)?;
        shard.collective.all_reduce_sum(&[&own])?;
        let remainders = sums(1)?.into_iter();
        Ok(remainders
            .zip(own.to_vec1::<f64>()?)
            .map(|(a, b)| a + b)
            .collect())
    }

    fn first_not_finite(&self, squared_norms: &[f64]) -> Option<(&str, f64)> {
        let mut named = self.names().zip(squared_norms);
        named
            .find(|&(_, &sum)| !(sum as f32).is_finite())
            .map(|(name, &sum)| (name, sum))
    }

    /// The names of all gradients, of which this rank may keep a part alone.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let whole = self.by_name.keys();
        whole.chain(self.kept.keys()).map(String::as_str)
    }

    /// The shape and the device of the gradient of this name, of which this rank may keep a part
    /// alone.
    pub(super) fn kind(&self, name: &str) -> Option<(&Shape, &Device)> {
        let kept = self.kept.get(name);
        let kept = kept.map(|(sum, shape)| (shape, sum.device()));
        let whole = self.by_name.get(name);
        kept.or_else(|| whole.map(|whole| (whole.shape(), whole.device())))
    }

    /// This rank's part of the gradient of this name, and the remainder.
    pub(super) fn parts(&self, shard: &Shard, name: &str) -> Result<[Tensor; 2]> {
        match (self.kept.get(name), self.by_name.get(name)) {
            (Some((sum, shape)), _) => shard.kept_parts(sum, shape.elem_count()),
            (None, Some(gradient)) => shard.own(gradient, gradient.elem_count()),
            (None, None) => bail!("gradients: no {name}, must have it"),
        }
    }

    /// Checks that all gradients are summed over the ranks, if some of them are divided.
    pub(super) fn ensure_summed(&self) -> Result<()> {
        match self.by_name.keys().next() {
            Some(name) if !self.kept.is_empty() => bail!(
                "gradient of {name}: of one rank alone, must be summed over the ranks: call begin_reduction before every backward pass"
            ),
            _ => Ok(()),
        }
    }

    /// Returns the global norm and the clipping factor `min(1, max_norm / (norm + 1e-6))`, like
    /// `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    ///
    /// If `max_norm` is not positive (infinity disables clipping), or if ranks have
    /// [divided](crate::optim::Sharding::Resident) the gradients of some backward passes and not of
    /// others. Also as for [`Self::global_norm`].
    pub fn clip_factor(&self, max_norm: f64) -> Result<(f64, f64)> {
        self.ensure_summed()?;
        if max_norm.is_nan() || max_norm <= 0.0 {
            bail!("max_norm: {max_norm}, must be positive");
        }
        let norm = self.global_norm()?;
        Ok((norm, (max_norm / (norm + 1e-6)).min(1.0)))
    }

    /// Scales all gradients in place by [`Self::clip_factor`]. Returns the norm before scaling.
    ///
    /// # Errors
    ///
    /// Same as [`Self::clip_factor`].
    pub fn clip_by_global_norm(&mut self, max_norm: f64) -> Result<f64> {
        let (norm, factor) = self.clip_factor(max_norm)?;
        if factor < 1.0 {
            let kept = self.kept.values().map(|(sum, _)| sum);
            scale_gradients(
                &self.by_name.values().chain(kept).collect::<Vec<_>>(),
                factor,
            )?;
        }
        Ok(norm)
    }

    /// Multiplies all gradients by `factor`. Gradients added later are not scaled.
    ///
    /// # Errors
    ///
    /// If the device does not have enough memory for one more gradient.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        // It sums the gradients as they are now.
        if self.reduction.is_some() {
            self.finish_reduction()?;
        }
        let kept = self.kept.values_mut().map(|(sum, _)| sum);
        for gradient in self.by_name.values_mut().chain(kept) {
            *gradient = (&*gradient * factor)?;
        }
        Ok(())
    }

    /// The gradient for this variable name. `None` if ranks [divide](crate::optim::Sharding) it:
    /// each of them has its own part of the sum.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// Names and gradients, sorted by name, as in [`Self::get`].
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name
            .iter()
            .map(|(name, gradient)| (name.as_str(), gradient))
    }

    /// Returns whether there are no gradients.
    pub fn is_empty(&self) -> bool {
        self.names().next().is_none() && self.reduction.is_none()
    }

    /// Removes all gradients, to start the next step.
    pub fn clear(&mut self) {
        self.reduction = None;
        self.shard = None;
        self.by_name.clear();
        self.kept.clear();
    }
}

/// Returns `gradient` in a dtype that operators take together with `dtype`: unchanged, unless one
/// of them is f64.
pub(super) fn beside(dtype: DType, gradient: &Tensor) -> Result<Tensor> {
    let wide = arithmetic_dtype(dtype);
    if arithmetic_dtype(gradient.dtype()) == wide {
        Ok(gradient.clone())
    } else {
        gradient.to_dtype(wide)
    }
}

/// Sum of squares for each gradient.
fn squares(gradients: &[&Tensor]) -> Result<Vec<f64>> {
    // Converted on the host, since not every device supports f64.
    squared_gradient_norms(gradients)?
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()
}
