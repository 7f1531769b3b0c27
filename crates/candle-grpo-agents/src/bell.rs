//! A signal from the server to the sampling thread.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A signal that persists until it is received.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    rang: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    pub(crate) fn ring(&self) {
        *self.rang.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for a signal, at most for `patience`. Returns false if none arrived.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let rang = self.rang.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(rang, patience, |rang| !*rang);
        let (mut rang, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *rang)
    }
}
