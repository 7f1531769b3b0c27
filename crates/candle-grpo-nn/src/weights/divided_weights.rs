//! Weights that ranks divide, and gather to compute with them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, InplaceOp1, Layout, MetalStorage, Result, Tensor, Var, bail,
};

use crate::weights::shard::Shard;

/// The weights that models compute with, of which each rank keeps its part
/// ([`Sharding::Full`](crate::optim::Sharding::Full)).
///
/// A weight has memory for all elements only while it is held. Models share the tensor itself, so
/// they compute with the gathered numbers without a change.
pub(crate) struct DividedWeights {
    shard: Shard,
    weights: Mutex<BTreeMap<String, Weight>>,
}

/// A weight that ranks divide.
struct Weight {
    /// The weight in a model. Without memory while nobody holds it.
    whole: Tensor,
    /// This rank's part, as [`Shard::keep`] lays it out.
    own: Var,
    /// The number of [`Held`] that name it.
    holders: usize,
}

impl DividedWeights {
    pub(crate) fn new(shard: Shard) -> Self {
        Self {
            shard,
            weights: Mutex::default(),
        }
    }

    /// Adds a weight of which this rank keeps `own`, and frees `whole`.
    pub(crate) fn insert(&self, name: &str, whole: &Var, own: Var) -> Result<()> {
        let whole = whole.as_detached_tensor();
        free(&whole)?;
        let weight = Weight {
            whole,
            own,
            holders: 0,
        };
        self.lock().insert(name.to_owned(), weight);
        Ok(())
    }

    /// This rank's part of the weight of this name.
    pub(crate) fn own(&self, name: &str) -> Option<Var> {
        self.lock().get(name).map(|weight| weight.own.clone())
    }

    /// The names of all weights, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The bytes of this rank's parts.
    pub(crate) fn num_bytes(&self) -> usize {
        let weights = self.lock();
        let bytes = weights
            .values()
            .map(|Weight { own, .. }| own.elem_count() * own.dtype().size_in_bytes());
        bytes.sum()
    }

    /// Gathers those of these weights that nobody holds. All ranks must call it together, with the
    /// same names.
    ///
    /// # Errors
    ///
    /// If there is no memory, or another rank has ended.
    pub(crate) fn hold(self: &Arc<Self>, names: &Arc<[String]>) -> Result<Held> {
        let mut weights = self.lock();
        let mut to_gather = Vec::new();
        for name in &**names {
            let Some(weight) = weights.get(name) else {
                bail!("weights: no {name}, must have it");
            };
            if weight.holders == 0 {
                to_gather.push((weight.own.as_detached_tensor(), weight.whole.clone()));
            }
        }
        let gather = || {
            for (_, whole) in &to_gather {
                resize(whole, whole.elem_count())?;
            }
            self.shard.gather_all(&to_gather)
        };
        if let Err(error) = gather() {
            to_gather.iter().try_for_each(|(_, whole)| free(whole))?;
            return Err(error);
        }
        for name in &**names {
            if let Some(weight) = weights.get_mut(name) {
                weight.holders += 1;
            }
        }
        Ok(Held {
            weights: Arc::clone(self),
            names: Arc::clone(names),
        })
    }

    /// Returns whether the weight of this name is held, or not divided.
    pub(crate) fn is_held(&self, name: &str) -> bool {
        let weights = self.lock();
        weights.get(name).is_none_or(|weight| weight.holders > 0)
    }

    /// Returns whether all weights are held.
    pub(crate) fn are_held(&self) -> bool {
        self.lock().values().all(|weight| weight.holders > 0)
    }

    /// Checks that nobody holds a weight, so that the parts may change.
    pub(crate) fn ensure_free(&self) -> Result<()> {
        let weights = self.lock();
        let mut held = weights.iter().filter(|(_, weight)| weight.holders > 0);
        match held.next() {
            Some((name, _)) => {
                bail!("{name}: gathered from all ranks, must be freed before it changes")
            }
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weight>> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for DividedWeights {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "DividedWeights({} of {:?})",
            self.lock().len(),
            self.shard
        )
    }
}

/// Weights that are gathered from all ranks until this is dropped.
#[derive(Debug)]
#[must_use = "the weights are freed when this is dropped"]
pub struct Held {
    weights: Arc<DividedWeights>,
    names: Arc<[String]>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut weights = self.weights.lock();
        for name in &*self.names {
            let Some(weight) = weights.get_mut(name) else {
                continue;
            };
            weight.holders -= 1;
            if weight.holders == 0 {
                // At worst the memory stays until the next pass.
                let _ = free(&weight.whole);
            }
        }
    }
}

/// Frees the memory of a contiguous tensor, which keeps its shape. A view of it must not be used
/// before it is [resized](resize).
fn free(tensor: &Tensor) -> Result<()> {
    // Not every device allocates 0 elements.
    resize(tensor, 1)
}

/// Gives a tensor new memory for this number of elements, whatever its shape. They are zero.
fn resize(tensor: &Tensor, elements: usize) -> Result<()> {
    tensor.inplace_op1(&Resize(elements))
}

struct Resize(usize);

impl Resize {
    fn apply<S: BackendStorage>(&self, storage: &mut S) -> Result<()>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        *storage = (storage.device()).zeros_impl(&self.0.into(), storage.dtype())?;
        Ok(())
    }
}

impl InplaceOp1 for Resize {
    fn name(&self) -> &'static str {
        "resize"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }
}
