//! Limits on a judge's requests: how many at a time, and how many in total.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use candle_grpo_base::workers::POLL;

/// Counts the requests over all threads.
pub(super) struct RequestLimits {
    max_inflight: usize,
    max_requests: Option<u64>,
    max_tokens: Option<u64>,
    state: Mutex<State>,
    /// Notified when a request ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    in_flight: usize,
    requests: u64,
    tokens: u64,
}

/// A permit to send a request, until it is dropped.
pub(super) struct Permit<'a>(&'a RequestLimits);

/// Result from [`RequestLimits::acquire`].
pub(super) enum Admission<'a> {
    Granted(Permit<'a>),
    /// The run's requests or tokens are used up.
    Exhausted,
    /// The caller stops.
    Stopped,
}

impl RequestLimits {
    pub(super) fn new(
        max_inflight: usize,
        max_requests: Option<u64>,
        max_tokens: Option<u64>,
    ) -> Self {
        Self {
            max_inflight,
            max_requests,
            max_tokens,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits until a request may be sent, and counts it.
    pub(super) fn acquire(&self, stop: &AtomicBool) -> Admission<'_> {
        let mut state = self.state();
        loop {
            if stop.load(Ordering::Acquire) {
                return Admission::Stopped;
            }
            let used_up = |used: u64, max: Option<u64>| max.is_some_and(|max| used >= max);
            if used_up(state.requests, self.max_requests) || used_up(state.tokens, self.max_tokens)
            {
                return Admission::Exhausted;
            }
            if state.in_flight < self.max_inflight {
                state.in_flight += 1;
                state.requests += 1;
                return Admission::Granted(Permit(self));
            }
            let woken = self.changed.wait_timeout(state, POLL);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit<'_> {
    /// Counts the tokens in the request and its answer.
    pub(super) fn count_tokens(&self, tokens: u64) {
        let mut state = self.0.state();
        state.tokens = state.tokens.saturating_add(tokens);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.state().in_flight -= 1;
        self.0.changed.notify_one();
    }
}
