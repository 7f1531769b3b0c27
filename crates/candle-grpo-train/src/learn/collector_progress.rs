//! Progress for the generator and the reward function.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::Progress;
use candle_grpo_base::progress::{NoProgress, Phase};

/// Forwards progress to a replaceable receiver, and can cancel by itself.
pub(super) struct CollectorProgress {
    receiver: RwLock<Arc<dyn Progress>>,
    /// True if completions are sampled while the policy trains. Then only training phases are
    /// reported.
    background: bool,
    stopped: AtomicBool,
}

impl CollectorProgress {
    pub(super) fn new(background: bool) -> Self {
        Self {
            receiver: RwLock::new(Arc::new(NoProgress)),
            background,
            stopped: AtomicBool::new(false),
        }
    }

    pub(super) fn receiver(&self) -> Arc<dyn Progress> {
        let receiver = self.receiver.read();
        Arc::clone(&receiver.unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_receiver(&self, progress: Arc<dyn Progress>) {
        let receiver = self.receiver.write();
        *receiver.unwrap_or_else(PoisonError::into_inner) = progress;
    }

    /// Cancels until it is called with `false`.
    pub(super) fn set_stopped(&self, stopped: bool) {
        self.stopped.store(stopped, Ordering::SeqCst);
    }
}

impl Progress for CollectorProgress {
    fn begin(&self, phase: Phase, units: usize) {
        if !self.background {
            self.receiver().begin(phase, units);
        }
    }

    fn advance(&self, units: usize, tokens: usize) {
        if !self.background {
            self.receiver().advance(units, tokens);
        }
    }

    fn is_canceled(&self) -> bool {
        self.stopped.load(Ordering::SeqCst) || self.receiver().is_canceled()
    }
}
