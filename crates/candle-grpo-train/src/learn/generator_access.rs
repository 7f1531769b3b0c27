//! Turns at the generator.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::Result;

use super::models::ensure_not_canceled;
use crate::Progress;
use crate::rollout::{Generator, PolicyWeights};

/// Exclusive access to a generator, to sample or to pass new weights.
///
/// A [reservation](Self::reserve) suspends the threads that call [`Self::wait`] until it is
/// released, so that an evaluation samples from the weights that it has passed.
#[derive(Default)]
pub(super) struct GeneratorAccess {
    /// Version of the generator's weights.
    version: Mutex<Option<u64>>,
    reserved: AtomicBool,
    released: Condvar,
}

/// A turn at the generator, which ends when dropped.
pub(super) struct Turn<'a>(MutexGuard<'a, Option<u64>>);

impl GeneratorAccess {
    /// Waits until the generator is idle.
    pub(super) fn lock(&self) -> Turn<'_> {
        Turn(self.version.lock().unwrap_or_else(|poisoned| {
            self.version.clear_poison();
            let mut version = poisoned.into_inner();
            // The generator panicked, perhaps while it received weights.
            *version = None;
            version
        }))
    }

    /// Waits until the generator is idle and not reserved.
    ///
    /// # Errors
    ///
    /// Fails with [`Interrupted`](crate::Interrupted) if `progress` cancels.
    pub(super) fn wait(&self, progress: &dyn Progress) -> Result<Turn<'_>> {
        let mut turn = self.lock();
        while self.reserved.load(Ordering::SeqCst) {
            ensure_not_canceled(progress)?;
            let version = self.released.wait(turn.0);
            turn = Turn(version.unwrap_or_else(PoisonError::into_inner));
        }
        Ok(turn)
    }

    /// Reserves the generator as soon as it finishes its current batch.
    pub(super) fn reserve(&self) -> Turn<'_> {
        self.reserved.store(true, Ordering::SeqCst);
        self.lock()
    }

    /// Ends a reservation. Without one, does not wait for a thread that samples.
    pub(super) fn release(&self) {
        if self.reserved.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes the waiting threads, which then check whether they are canceled.
    pub(super) fn wake(&self) {
        // A thread between its check and its wait holds the lock.
        drop(self.lock());
        self.released.notify_all();
    }
}

impl Turn<'_> {
    /// Passes `weights` to `generator`, unless it already has these or newer ones.
    pub(super) fn update<C>(
        &mut self,
        generator: &dyn Generator<C>,
        weights: &PolicyWeights<'_, C>,
        progress: &dyn Progress,
    ) -> Result<()> {
        if self.0.is_none_or(|version| version < weights.version) {
            generator.weights_changed(weights, progress)?;
            *self.0 = Some(weights.version);
        }
        Ok(())
    }

    /// Lets `generator` release memory until it receives weights, if it does.
    pub(super) fn sleep<C>(
        &mut self,
        generator: &dyn Generator<C>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let slept = generator.sleep(progress);
        // After an error, some of its weights may be lost.
        if !matches!(slept, Ok(false)) {
            self.reset();
        }
        slept.map(drop)
    }

    /// Clears the version, so that the generator receives the next weights.
    pub(super) fn reset(&mut self) {
        *self.0 = None;
    }
}
