//! Progress reports and cancellation of a step.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// The phase of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Sampling of completions. A unit is a completion; its tokens are those drawn.
    Sample,
    /// Decoding and scoring of completions.
    Score,
    /// Sampling for an evaluation; units and tokens as in [`Phase::Sample`].
    Evaluate,
    /// Writing of a checkpoint: one unit.
    Save,
    /// Forward and backward passes. A unit is a completion, or a row of supervised training; its
    /// tokens are those that count in the loss.
    Learn,
    /// The loss of held-out rows; units and tokens as in [`Phase::Learn`].
    HeldOutLoss,
    /// Download of files of the hub. A unit is a byte.
    Download,
}

/// Receives the progress of steps and can cancel them. [`Self::begin`] and [`Self::advance`] are
/// called from one thread at a time, as is [`Self::drawn`], and [`Self::is_canceled`] from several.
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
    /// Starts a phase of `units` units.
    fn begin(&self, phase: Phase, units: usize) {
        let _ = (phase, units);
    }

    /// Adds finished units and tokens to the phase.
    fn advance(&self, units: usize, tokens: usize) {
        let _ = (units, tokens);
    }

    /// Receives the tokens so far of a completion that the policy in this process draws, each time
    /// it has one more. `place` is its number in the batch.
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

/// Passes progress on and never cancels.
pub struct NeverCanceled(pub Arc<dyn Progress>);

impl Progress for NeverCanceled {
    fn begin(&self, phase: Phase, units: usize) {
        self.0.begin(phase, units);
    }

    fn advance(&self, units: usize, tokens: usize) {
        self.0.advance(units, tokens);
    }
}

/// The error of an operation that [`Progress::is_canceled`] canceled.
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
