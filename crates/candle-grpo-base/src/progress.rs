//! Progress reports and cancellation for a step.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// A phase within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Sampling completions. A unit is a completion; tokens are those sampled.
    Sample,
    /// Decoding and scoring completions.
    Score,
    /// Sampling for an evaluation; units and tokens as in [`Phase::Sample`].
    Evaluate,
    /// Writing a checkpoint: one unit.
    Save,
    /// Forward and backward passes. A unit is a completion, or a row in supervised training. Tokens
    /// are those that count in the loss.
    Learn,
    /// Held-out loss; units and tokens as in [`Phase::Learn`].
    HeldOutLoss,
    /// Downloading files from the hub. A unit is a byte.
    Download,
    /// Uploading files to the hub. A unit is a byte.
    Upload,
}

/// Receives progress from steps, and can cancel them. [`Self::begin`], [`Self::advance`] and
/// [`Self::drawn`] are called from one thread at a time, [`Self::is_canceled`] from several.
///
/// ```
/// use std::time::Instant;
///
/// use candle_grpo_base::Progress;
///
/// /// Cancels at a point in time.
/// struct Until(Instant);
///
/// impl Progress for Until {
///     fn is_canceled(&self) -> bool {
///         Instant::now() >= self.0
///     }
/// }
/// assert!(Until(Instant::now()).is_canceled());
/// ```
pub trait Progress: Send + Sync {
    /// Starts a phase with `units` units.
    fn begin(&self, phase: Phase, units: usize) {
        let _ = (phase, units);
    }

    /// Adds finished units and tokens to the phase.
    fn advance(&self, units: usize, tokens: usize) {
        let _ = (units, tokens);
    }

    /// Receives a completion's tokens so far, each time the policy in this process samples another
    /// one. `place` is its index in the batch.
    fn drawn(&self, place: usize, tokens: &[u32]) {
        let _ = (place, tokens);
    }

    /// Returns true to cancel the step, which then ends with [`Interrupted`] as soon as possible.
    fn is_canceled(&self) -> bool {
        false
    }
}

/// Ignores progress and never cancels.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}

/// Forwards progress and never cancels.
pub struct NeverCanceled(pub Arc<dyn Progress>);

impl Progress for NeverCanceled {
    fn begin(&self, phase: Phase, units: usize) {
        self.0.begin(phase, units);
    }

    fn advance(&self, units: usize, tokens: usize) {
        self.0.advance(units, tokens);
    }
}

/// The error when [`Progress::is_canceled`] cancels an operation.
///
/// ```
/// use candle_grpo_base::Interrupted;
///
/// let error = anyhow::Error::new(Interrupted).context("step 3");
/// assert!(error.is::<Interrupted>());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl Error for Interrupted {}
