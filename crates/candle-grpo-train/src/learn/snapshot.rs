//! Policy weight copies.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use candle_core::Device;
use candle_grpo_nn::{Lora, Parameters};

use crate::rollout::PolicyWeights;

/// A copy of the trained weights in main memory, for another thread. Later updates do not change
/// it.
pub(super) struct Snapshot<C> {
    version: u64,
    model: C,
    parameters: Parameters,
    adapters: Option<Lora>,
}

impl<C: Clone> Snapshot<C> {
    /// Copies `weights`. `base` are the frozen parameters under adapters, in main memory, which are
    /// shared.
    pub(super) fn new(weights: &PolicyWeights<'_, C>, base: Option<Parameters>) -> Result<Self> {
        let adapters = weights.adapters;
        Ok(Self {
            version: weights.version,
            model: weights.model.clone(),
            parameters: match base {
                Some(base) => base,
                None => weights.parameters.copy_to(&Device::Cpu)?,
            },
            adapters: adapters
                .map(|adapters| adapters.copy_to(&Device::Cpu))
                .transpose()?,
        })
    }

    pub(super) fn weights(&self) -> PolicyWeights<'_, C> {
        PolicyWeights {
            version: self.version,
            model: &self.model,
            parameters: &self.parameters,
            adapters: self.adapters.as_ref(),
        }
    }
}

/// The newest weights, from the thread that trains to the one that samples.
pub(super) struct NewestWeights<C>(Mutex<Option<Snapshot<C>>>);

impl<C> Default for NewestWeights<C> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<C> NewestWeights<C> {
    fn lock(&self) -> MutexGuard<'_, Option<Snapshot<C>>> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the weights.
    pub(super) fn put(&self, weights: Snapshot<C>) {
        *self.lock() = Some(weights);
    }

    /// Returns whether there are weights that [`Self::take`] has not returned.
    pub(super) fn have_arrived(&self) -> bool {
        self.lock().is_some()
    }

    /// Returns the weights, unless it has returned them before.
    pub(super) fn take(&self) -> Option<Snapshot<C>> {
        self.lock().take()
    }
}
