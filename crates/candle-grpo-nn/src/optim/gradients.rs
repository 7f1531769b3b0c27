//! Gradients over micro-batches.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_kernels::{scale_gradients, squared_gradient_norms};

use crate::Parameters;

/// One gradient for each variable, summed over micro-batches.
///
/// The gradients are detached: Candle's own `GradStore` keeps the forward graph alive as long as it lives.
#[derive(Debug, Default)]
pub struct Gradients {
    by_name: BTreeMap<String, Tensor>,
}

impl Gradients {
    /// No gradients yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs backward from `loss`, a tensor of one element, and adds the gradient of every variable.
    ///
    /// It is an error, which lists the names, when a variable receives no gradient: some operator on the way has
    /// cut the graph, or the variable is not used. After an error nothing has been added.
    pub fn accumulate(&mut self, loss: &Tensor, parameters: &Parameters) -> Result<()> {
        if loss.elem_count() != 1 || !loss.dtype().is_float() {
            bail!(
                "loss: shape {:?} and dtype {:?}, must be one floating-point number",
                loss.dims(),
                loss.dtype()
            );
        }
        let mut store = loss.backward()?;
        let mut received = BTreeMap::new();
        let mut missing = Vec::new();
        for (name, variable) in parameters.iter() {
            match store.remove(variable) {
                Some(gradient) => {
                    received.insert(name.to_owned(), gradient.detach().contiguous()?);
                }
                None => missing.push(name),
            }
        }
        drop(store);
        ensure_none(missing, parameters.len())?;
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

    /// Runs backward from `loss`, a tensor of one element, and adds the gradients of the variables that it reaches; others stay
    /// without. [`Self::ensure_complete`] asks for all of them, after all that adds to them. Returns what else was reached.
    pub fn add_reached(&mut self, loss: &Tensor, parameters: &Parameters) -> Result<GradStore> {
        let mut store = loss.backward()?;
        for (name, variable) in parameters.iter() {
            if let Some(gradient) = store.remove(variable) {
                self.add(name, &gradient)?;
            }
        }
        Ok(store)
    }

    /// Adds the gradient of the variable of that name, of any float dtype, as f32: for what is computed without Candle's `backward`. The
    /// first one is taken as it is, if it is f32 already, and later ones may be added to it in place.
    pub fn add(&mut self, name: &str, gradient: &Tensor) -> Result<()> {
        let gradient = gradient.detach().to_dtype(DType::F32)?.contiguous()?;
        match self.by_name.get_mut(name) {
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

    /// Errs with their names if variables of `parameters` have no gradient.
    pub fn ensure_complete(&self, parameters: &Parameters) -> Result<()> {
        let missing = parameters
            .iter()
            .map(|(name, _)| name)
            .filter(|name| !self.by_name.contains_key(*name));
        ensure_none(missing.collect(), parameters.len())
    }

    /// The Euclidean norm over all gradients together; 0 when there are none.
    ///
    /// Squares are summed in f64. One transfer to the host. A gradient whose squares sum to more than f32 holds is an error that
    /// names the first to blame: the optimizer squares it in f32.
    pub fn global_norm(&self) -> Result<f64> {
        let sums = self.squared_norms()?;
        if let Some((name, sum)) = self.first_not_finite(&sums) {
            bail!("gradient of {name}: not finite, its squares sum to {sum}");
        }
        Ok(sums.iter().sum::<f64>().sqrt())
    }

    /// The name of the first gradient for which [`Self::global_norm`] errs.
    pub fn not_finite(&self) -> Result<Option<&str>> {
        let sums = self.squared_norms()?;
        Ok(self.first_not_finite(&sums).map(|(name, _)| name))
    }

    fn squared_norms(&self) -> Result<Vec<f64>> {
        let gradients: Vec<_> = self.by_name.values().collect();
        // Widened on the host: not every device has f64.
        squared_gradient_norms(&gradients)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()
    }

    fn first_not_finite(&self, squared_norms: &[f64]) -> Option<(&str, f64)> {
        let mut named = self.by_name.keys().zip(squared_norms);
        named
            .find(|&(_, &sum)| !(sum as f32).is_finite())
            .map(|(name, &sum)| (name.as_str(), sum))
    }

    /// Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does, and
    /// returns the norm before. The gradients change in place.
    ///
    /// `max_norm` must be positive; infinity means no clipping. A norm that is not finite is an error, see
    /// [`Self::global_norm`].
    pub fn clip_by_global_norm(&mut self, max_norm: f64) -> Result<f64> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            bail!("max_norm: {max_norm}, must be positive");
        }
        let norm = self.global_norm()?;
        let scale = max_norm / (norm + 1e-6);
        if scale < 1.0 {
            scale_gradients(&self.by_name.values().collect::<Vec<_>>(), scale)?;
        }
        Ok(norm)
    }

    /// The gradient of the variable of that name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// Names and gradients in sorted order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name
            .iter()
            .map(|(name, gradient)| (name.as_str(), gradient))
    }

    /// Whether nothing has been accumulated.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Forgets all gradients, to begin the next step.
    pub fn clear(&mut self) {
        self.by_name.clear();
    }
}

fn ensure_none(missing: Vec<&str>, of: usize) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "{} of {of} variables received no gradient from the loss: {}",
        missing.len(),
        missing.join(", ")
    );
}
