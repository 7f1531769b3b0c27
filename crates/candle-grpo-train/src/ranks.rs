//! Ranks in a data-parallel run, and how they share a step's work.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_nn::SequenceRanks;
use candle_grpo_nn::optim::Sharding;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Interrupted, Progress};
use candle_grpo_base::progress::NeverCanceled;

/// All ranks in a run. Clones share them.
///
/// Ranks share expensive work: completions, scores, and passes over the models. They exchange the
/// results, and every rank computes everything else from the same numbers.
#[derive(Clone)]
pub struct Ranks {
    all: Arc<dyn Collective>,
    /// This rank's team, if it is not alone.
    team: Option<SequenceRanks>,
}

impl Default for Ranks {
    fn default() -> Self {
        Self::new(Arc::new(Alone))
    }
}

impl Ranks {
    /// Wraps the ranks in `collective`.
    pub fn new(collective: Arc<dyn Collective>) -> Self {
        Self {
            all: collective,
            team: None,
        }
    }

    /// Forms teams of `size` ranks with consecutive numbers. The ranks of a team share each pass
    /// over a policy, a reference or a critic: they divide the tokens of each sequence. All ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// If `size` does not divide the number of ranks, or their collective has no groups.
    pub fn in_teams(self, size: usize) -> Result<Self> {
        let world_size = self.all.world_size();
        ensure!(
            size > 0 && world_size.is_multiple_of(size),
            "sequence_ranks: {size}, must divide the number of ranks, {world_size}"
        );
        let team = match size {
            1 => None,
            _ => Some(SequenceRanks::new(self.all.split(self.all.rank() / size)?)),
        };
        Ok(Self { team, ..self })
    }

    /// Returns the shares of passes that ranks divide: those of teams, or of single ranks.
    pub(crate) fn shares(&self, in_teams: bool) -> Shares<'_> {
        let team = self.team.as_ref().filter(|_| in_teams);
        let size = team.map_or(1, |team| team.collective().world_size());
        Shares {
            team,
            own: self.all.rank() / size,
            count: self.all.world_size() / size,
        }
    }

    /// Collective operations between the ranks.
    pub fn collective(&self) -> &Arc<dyn Collective> {
        &self.all
    }

    /// Returns the ranks of a model that they do not divide.
    pub(crate) fn undivided(&self) -> (&Arc<dyn Collective>, Sharding) {
        (&self.all, Sharding::None)
    }

    /// Returns whether there is only one rank.
    pub fn is_alone(&self) -> bool {
        self.all.world_size() == 1
    }

    /// Returns whether this is rank 0, which writes a run's files.
    pub fn is_first(&self) -> bool {
        self.all.rank() == 0
    }

    /// This rank's part of `total` items. The ranks' parts are consecutive, and differ by at most
    /// one item.
    pub(crate) fn share(&self, total: usize) -> Range<usize> {
        self.shares(false).share(total)
    }

    /// Returns each rank's value. All ranks must call it.
    ///
    /// # Errors
    ///
    /// Fails if another rank has ended, or a value cannot be serialized.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        if self.is_alone() {
            return Ok(vec![own]);
        }
        let bytes = postcard::to_stdvec(&own).context("a value for the other ranks")?;
        let all = self.all.all_gather_bytes(&bytes)?;
        all.iter()
            .enumerate()
            .map(|(rank, bytes)| {
                postcard::from_bytes(bytes).with_context(|| format!("the value of rank {rank}"))
            })
            .collect()
    }

    /// Returns rank 0's value. All ranks must call it; the others pass `None`.
    ///
    /// # Errors
    ///
    /// Same as [`Self::gather`]. Also if rank 0 passes `None`.
    pub fn from_first<T: Serialize + DeserializeOwned>(&self, own: Option<T>) -> Result<T> {
        let first = self.gather(own)?.into_iter().next();
        first.flatten().context("a value of rank 0: none")
    }

    /// Returns the progress for work within a step, in a run that reports to `receiver`. With
    /// several ranks, none can cancel alone.
    pub(crate) fn progress_of_step(&self, receiver: &Arc<dyn Progress>) -> Arc<dyn Progress> {
        if self.is_alone() {
            Arc::clone(receiver)
        } else {
            Arc::new(NeverCanceled(Arc::clone(receiver)))
        }
    }

    /// Fails with [`Interrupted`] if `own`, this rank's progress, or another rank's cancels. All
    /// ranks must call it.
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

    /// Returns the first rank whose value differs from rank 0's, with both values. All ranks must
    /// call it, and get the same result.
    ///
    /// # Errors
    ///
    /// Same as [`Self::gather`].
    pub fn first_difference(&self, own: String) -> Result<Option<(usize, [String; 2])>> {
        let mut all = self.gather(own)?;
        let rank = all.iter().position(|other| *other != all[0]);
        Ok(rank.map(|rank| (rank, [all.swap_remove(rank), all.swap_remove(0)])))
    }
}

/// Part `number` of `count` consecutive parts of `total` items, which differ by at most one item.
pub(crate) fn share_of(number: usize, count: usize, total: usize) -> Range<usize> {
    total * number / count..total * (number + 1) / count
}

/// The shares of work that single ranks or teams have.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    /// The ranks that share each pass with this one, if any.
    pub(crate) team: Option<&'a SequenceRanks>,
    /// The number of this rank's share.
    pub(crate) own: usize,
    /// The number of shares.
    pub(crate) count: usize,
}

impl Shares<'_> {
    /// The own part of `total` items. The parts are consecutive, and differ by at most one item.
    pub(crate) fn share(&self, total: usize) -> Range<usize> {
        self.share_of(self.own, total)
    }

    /// [`Self::share`] for share `number`.
    pub(crate) fn share_of(&self, number: usize, total: usize) -> Range<usize> {
        share_of(number, self.count, total)
    }

    /// Returns whether this rank reports the results of its share. Those of a team are equal on all
    /// of its ranks, and the first one reports them.
    pub(crate) fn reports(&self) -> bool {
        self.team.is_none_or(|team| team.collective().rank() == 0)
    }
}
