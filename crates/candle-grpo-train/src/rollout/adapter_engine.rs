//! The interface to engines that sample from several adapters.

use std::path::Path;

use anyhow::Result;

use super::{Generator, PolicyWeights};
use crate::Progress;

/// An engine that samples from several adapters over one base model at the same time.
///
/// [`ServerAdapters`](super::engine::ServerAdapters) are vLLM or SGLang servers. Use it where each
/// adapter stays as it was saved, such as in a server that samples for several clients. For a
/// policy that trains, use a [`Generator`], which receives its weights after each update.
pub trait AdapterEngine: Send + Sync {
    /// Loads adapters from the PEFT directory `folder`, and returns a generator that samples from
    /// them until it is dropped. `weights` are the base model with these adapters, for comparison.
    /// Their version has no meaning.
    ///
    /// Several threads may call it, and the generators, at the same time.
    ///
    /// # Errors
    ///
    /// Fails if the adapters cannot be loaded, or with [`Interrupted`](crate::Interrupted) after
    /// [`Progress::is_canceled`] returns true.
    fn open(
        &self,
        folder: &Path,
        weights: &PolicyWeights<'_>,
        progress: &dyn Progress,
    ) -> Result<Box<dyn Generator>>;
}
