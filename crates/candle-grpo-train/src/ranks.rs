//! The ranks of a data-parallel run, and how they share the work of a step.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_collective::{Alone, Collective};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Interrupted, Progress};
use candle_grpo_base::progress::NeverCanceled;

/// All ranks of a run. A clone shares them.
///
/// Ranks share what is expensive: completions, scores, and passes over the models. They exchange
/// the results, so that every rank computes everything else, from the same numbers.
#[derive(Clone)]
pub struct Ranks(Arc<dyn Collective>);

impl Default for Ranks {
    fn default() -> Self {
        Self(Arc::new(Alone))
    }
}

impl Ranks {
    /// The ranks of `collective`.
    pub fn new(collective: Arc<dyn Collective>) -> Self {
        Self(collective)
    }

    /// The operations of all ranks.
    pub fn collective(&self) -> &Arc<dyn Collective> {
        &self.0
    }

    /// Returns true if there is one rank.
    pub fn is_alone(&self) -> bool {
        self.0.world_size() == 1
    }

    /// Returns true on rank 0, which writes the files of a run.
    pub fn is_first(&self) -> bool {
        self.0.rank() == 0
    }

    /// The part of `total` items that belongs to this rank. The parts of all ranks follow each
    /// other and differ by one item at most.
    pub(crate) fn share(&self, total: usize) -> Range<usize> {
        self.share_of(self.0.rank(), total)
    }

    /// [`Self::share`] of the rank `rank`.
    pub(crate) fn share_of(&self, rank: usize, total: usize) -> Range<usize> {
        let world_size = self.0.world_size();
        total * rank / world_size..total * (rank + 1) / world_size
    }

    /// Returns the value of each rank. All ranks must call it.
    ///
    /// # Errors
    ///
    /// If another rank has ended, or a value cannot be serialized.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        if self.is_alone() {
            return Ok(vec![own]);
        }
        let bytes = postcard::to_stdvec(&own).context("a value for the other ranks")?;
        let all = self.0.all_gather_bytes(&bytes)?;
        all.iter()
            .enumerate()
            .map(|(rank, bytes)| {
                postcard::from_bytes(bytes).with_context(|| format!("the value of rank {rank}"))
            })
            .collect()
    }

    /// Returns the value of rank 0. All ranks must call it; the others pass `None`.
    ///
    /// # Errors
    ///
    /// As in [`Self::gather`], and if rank 0 passes `None`.
    pub fn from_first<T: Serialize + DeserializeOwned>(&self, own: Option<T>) -> Result<T> {
        let first = self.gather(own)?.into_iter().next();
        first.flatten().context("a value of rank 0: none")
    }

    /// Returns the progress of what runs within a step of the run that reports to `receiver`. One
    /// of several ranks cannot cancel alone.
    pub(crate) fn progress_of_step(&self, receiver: &Arc<dyn Progress>) -> Arc<dyn Progress> {
        if self.is_alone() {
            Arc::clone(receiver)
        } else {
            Arc::new(NeverCanceled(Arc::clone(receiver)))
        }
    }

    /// Returns [`Interrupted`] as an error if `own`, the progress of this rank, or that of another
    /// one cancels. All ranks must call it.
    ///
    /// # Errors
    ///
    /// Also if another rank has ended.
    pub(crate) fn ensure_not_canceled(&self, own: &dyn Progress) -> Result<()> {
        if self.gather(own.is_canceled())?.contains(&true) {
            Err(Interrupted.into())
        } else {
            Ok(())
        }
    }

    /// Returns the first rank whose value is not that of rank 0, with its value and that of rank 0.
    /// All ranks must call it, and get the same result.
    ///
    /// # Errors
    ///
    /// As in [`Self::gather`].
    pub fn first_difference(&self, own: String) -> Result<Option<(usize, [String; 2])>> {
        let mut all = self.gather(own)?;
        let rank = all.iter().position(|other| *other != all[0]);
        Ok(rank.map(|rank| (rank, [all.swap_remove(rank), all.swap_remove(0)])))
    }
}
