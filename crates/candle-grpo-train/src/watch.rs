//! Following a step while it is made, and stopping it.

use std::error::Error;
use std::fmt;

/// What a step is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Drawing completions. A unit is a completion, its tokens those drawn.
    Sample,
    /// Decoding and scoring completions.
    Score,
    /// Drawing completions of an evaluation; units and tokens as in [`Phase::Sample`].
    Evaluate,
    /// Writing a checkpoint: one unit.
    Save,
    /// Forward and backward passes. A unit is a completion, its tokens those that count in the loss.
    Learn,
}

/// Is told how far a step has come, and says when it should stop. Called from one thread at a time.
pub trait Watch: Send + Sync {
    /// So many units are to be done.
    fn begin(&self, phase: Phase, units: usize) {
        let _ = (phase, units);
    }

    /// So many units more are done, and so many tokens.
    fn advance(&self, units: usize, tokens: usize) {
        let _ = (units, tokens);
    }

    /// Whether the step should stop as soon as it can. It then ends with [`Interrupted`].
    fn wants_stop(&self) -> bool {
        false
    }
}

/// Looks away.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {}

/// The error of what was stopped by [`Watch::wants_stop`].
///
/// ```
/// use candle_grpo_train::Interrupted;
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
