//! The division of a batch into micro-batches, which the ranks share.

use anyhow::Result;
use candle_core::Tensor;
use candle_grpo_nn::{DividedModel, LanguageModel, SequenceRanks};
use serde::{Deserialize, Serialize};

use super::gradient_descent::GradientDescent;
use super::models::ensure_not_canceled;
use crate::ranks::{Ranks, Shares};
use crate::sequence::{Batch, Column, divide};
use crate::{Actor, Critic, Progress, Sequence, TokenBatch, TrainConfig, TrainingBatch};
use candle_grpo_base::progress::NoProgress;

/// The bound of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MicroBatchSize {
    /// A number of sequences.
    Sequences(usize),
    /// A number of tokens that the model reads. A shared prompt counts once.
    Tokens(usize),
    /// A number of tokens that the model reads, in which a shared prompt counts each time: the
    /// bound of supervised rows, which have none in common as a rule.
    TokensOfRows(usize),
}

impl MicroBatchSize {
    /// Returns the indices of the sequences of each micro-batch of each share.
    pub(crate) fn of_shares(self, sequences: &[Sequence], shares: Shares) -> Vec<Vec<Vec<usize>>> {
        let total = sequences.len();
        let whole = match self {
            Self::Sequences(size) => {
                let sequences: Vec<usize> = (0..total).collect();
                if total.div_ceil(size) < shares.count {
                    // Parts of one micro-batch each, so that every share has some work.
                    let parts = (0..shares.count).map(|number| shares.share_of(number, total));
                    parts.map(|part| sequences[part].to_vec()).collect()
                } else {
                    sequences.chunks(size).map(<[usize]>::to_vec).collect()
                }
            }
            Self::Tokens(bound) => divide(sequences, bound, true, shares.count),
            Self::TokensOfRows(bound) => divide(sequences, bound, false, shares.count),
        };
        let of_share = |number| {
            let own = whole[shares.share_of(number, whole.len())].iter();
            own.filter(|part| !part.is_empty()).cloned().collect()
        };
        (0..shares.count).map(of_share).collect()
    }
}

/// The number of tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "expected a number of tokens or auto")]
pub enum MicroBatchTokens {
    /// At most this number.
    Tokens(usize),
    /// The number that fits into memory, which [`MemoryFit`](super::MemoryFit) chooses before the
    /// run.
    Auto(Auto),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// `auto`.
    Auto,
}

impl From<usize> for MicroBatchTokens {
    fn from(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }
}

/// A batch that is divided into micro-batches.
pub(crate) trait Divisible: Sized {
    fn sequences(&self) -> &[Sequence];

    /// The sequences with these indices.
    fn part(&self, sequences: &[usize]) -> Result<Self>;

    /// True if the ranks of a team can divide the tokens of each sequence.
    const IN_TEAMS: bool;

    /// Lets the ranks of a team divide the tokens of each sequence, if they can.
    fn divided(self, team: Option<&SequenceRanks>) -> Self;

    /// A pass for a rank without work, which takes part in the sum of the gradients.
    fn idle_part(&self) -> Result<Self> {
        self.part(&[0])
    }
}

impl Divisible for TrainingBatch {
    fn sequences(&self) -> &[Sequence] {
        self.tokens().sequences()
    }

    fn part(&self, sequences: &[usize]) -> Result<Self> {
        self.select(sequences)
    }

    const IN_TEAMS: bool = true;

    fn divided(self, team: Option<&SequenceRanks>) -> Self {
        self.divided(team)
    }

    fn idle_part(&self) -> Result<Self> {
        self.without_work()
    }
}

impl Divisible for Batch {
    fn sequences(&self) -> &[Sequence] {
        Self::sequences(self)
    }

    fn part(&self, sequences: &[usize]) -> Result<Self> {
        self.select(sequences)
    }

    const IN_TEAMS: bool = false;

    fn divided(self, _: Option<&SequenceRanks>) -> Self {
        self
    }
}

/// The micro-batches of a batch.
pub(crate) struct Divided<B> {
    /// The micro-batches of this rank.
    pub(crate) own: Vec<B>,
    /// The number of those of all ranks.
    pub(crate) count: usize,
    /// The largest number of those of a rank.
    pub(crate) most_of_rank: usize,
    /// True if this rank reports the results.
    reports: bool,
}

/// A model whose gradients accumulate over the passes of an update.
pub(crate) trait Accumulates {
    fn descent(&mut self) -> &mut GradientDescent;
}

impl<M: LanguageModel> Accumulates for Actor<M> {
    fn descent(&mut self) -> &mut GradientDescent {
        &mut self.descent
    }
}

impl Accumulates for Critic {
    fn descent(&mut self) -> &mut GradientDescent {
        &mut self.descent
    }
}

/// Passes of a model over a batch, in micro-batches that the ranks share.
#[derive(Clone, Copy)]
pub struct MicroBatches<'a> {
    /// The bound of a micro-batch.
    pub size: MicroBatchSize,
    /// Cancels before a pass.
    pub progress: &'a dyn Progress,
    /// Receives the progress of an update.
    pub receiver: &'a dyn Progress,
    /// The ranks.
    pub ranks: &'a Ranks,
    /// True if all ranks make as many passes, because they gather weights in each.
    pub gathers: bool,
}

impl<'a> MicroBatches<'a> {
    /// Creates passes of `ranks` in the micro-batches of the settings, which report to no receiver.
    ///
    /// # Errors
    ///
    /// If [`TrainConfig::micro_batch_tokens`] is `auto`.
    pub fn new(config: &TrainConfig, ranks: &'a Ranks) -> Result<Self> {
        Ok(Self {
            size: config.micro_batches()?,
            progress: &NoProgress,
            receiver: &NoProgress,
            ranks,
            gathers: false,
        })
    }

    /// Divides `batch` into micro-batches.
    pub(crate) fn divide<B: Divisible>(self, batch: &B) -> Result<Divided<B>> {
        let shares = self.ranks.shares(B::IN_TEAMS);
        let all = self.size.of_shares(batch.sequences(), shares);
        let own = all[shares.own].iter();
        let own = own.map(|sequences| Ok(batch.part(sequences)?.divided(shares.team)));
        let counts = || all.iter().map(Vec::len);
        Ok(Divided {
            own: own.collect::<Result<_>>()?,
            count: counts().sum(),
            most_of_rank: counts().max().unwrap_or(0),
            reports: shares.reports(),
        })
    }

    /// Runs `pass` over each micro-batch of this rank in `divided`, those of `batch`, and returns
    /// its results. In a team, one rank returns them. With `reduces` the last pass sums the
    /// gradients over all ranks, so it must be the last one of the update. If a learner reduces
    /// in each pass, all ranks make as many. A rank without micro-batches for a pass that
    /// reduces passes [`Divisible::idle_part`], and true for a part without work, whose
    /// gradients must be 0.
    ///
    /// # Errors
    ///
    /// If a pass fails, or with [`Interrupted`](crate::Interrupted) if the progress cancels.
    pub(crate) fn accumulate<L: Accumulates, B: Divisible, T>(
        self,
        learner: &mut L,
        (batch, divided): (&B, &Divided<B>),
        reduces: bool,
        mut pass: impl FnMut(&mut L, &B, bool) -> Result<T>,
    ) -> Result<Vec<T>> {
        let team = self.ranks.shares(B::IN_TEAMS).team;
        learner.descent().reduce_in_turn(team.is_some());
        let reduces_each = learner.descent().reduces_each_pass();
        let passes = if reduces_each {
            divided.most_of_rank
        } else {
            divided.own.len().max(usize::from(reduces))
        };
        let mut results = Vec::with_capacity(divided.own.len());
        for number in 0..passes {
            ensure_not_canceled(self.progress)?;
            if reduces_each || reduces && number + 1 == passes {
                let collective = self.ranks.collective();
                learner.descent().begin_reduction(collective)?;
            }
            let Some(part) = divided.own.get(number) else {
                pass(learner, &batch.idle_part()?.divided(team), true)?;
                continue;
            };
            let found = pass(learner, part, false)?;
            results.extend(divided.reports.then_some(found));
            let tokens = part.sequences().iter().map(Sequence::num_trained_tokens);
            self.receiver
                .advance(part.sequences().len(), tokens.sum::<usize>());
        }
        ensure_not_canceled(self.progress)?;
        Ok(results)
    }

    /// These passes of a model whose weights ranks may divide.
    pub(super) fn over(self, divided: Option<&DividedModel>) -> Self {
        Self {
            gathers: divided.is_some(),
            ..self
        }
    }

    /// All sequences of a rank in one micro-batch.
    pub(super) fn at_once(self) -> Self {
        Self {
            size: MicroBatchSize::Sequences(usize::MAX),
            ..self
        }
    }

    /// Returns whether [`Self::at_once`] made this. A call that is not bounded is not a pass of
    /// this process, so that teams do not share it.
    fn is_at_once(self) -> bool {
        self.size == MicroBatchSize::Sequences(usize::MAX)
    }

    /// Concatenates `forward` `[B, ..]` of all micro-batches of `tokens`, in the order of `tokens`.
    ///
    /// # Errors
    ///
    /// If `forward` fails, or with [`Interrupted`](crate::Interrupted) if the progress cancels.
    pub(super) fn map(
        self,
        tokens: &TokenBatch,
        forward: impl Fn(&TokenBatch) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.pieces(tokens, forward)?.joined(|piece| piece)
    }

    /// The results of `forward` of the micro-batches of this rank.
    ///
    /// # Errors
    ///
    /// As in [`Self::map`].
    pub(super) fn pieces<'b, T>(
        self,
        tokens: &'b TokenBatch,
        forward: impl Fn(&TokenBatch) -> Result<T>,
    ) -> Result<Pieces<'b, T>> {
        let shares = self.ranks.shares(!self.is_at_once());
        let all = self.size.of_shares(tokens.sequences(), shares);
        let parts = &all[shares.own];
        let own = parts.iter().map(|own| {
            ensure_not_canceled(self.progress)?;
            forward(&tokens.select(own)?.divided(shares.team))
        });
        let own = own.collect::<Result<_>>()?;
        if self.gathers {
            let most = all.iter().map(Vec::len).max().unwrap_or(0);
            for _ in parts.len()..most {
                // Takes part in the passes of the others.
                forward(&tokens.select(&[0])?)?;
            }
        }
        Ok(Pieces {
            own,
            ranks: self.ranks.clone(),
            share: shares.own,
            reports: shares.reports(),
            all,
            tokens,
        })
    }
}

/// The results of the micro-batches of a rank.
pub(super) struct Pieces<'a, T> {
    own: Vec<T>,
    /// The sequences of each micro-batch of each share.
    all: Vec<Vec<Vec<usize>>>,
    /// The share of this rank, and whether it reports it.
    share: usize,
    reports: bool,
    ranks: Ranks,
    tokens: &'a TokenBatch,
}

impl<T> Pieces<'_, T> {
    /// Concatenates `part` `[B, ..]` of the results of all ranks, in the order of the batch. Ranks
    /// exchange them in their dtype, without padding, for which they wait for the device.
    pub(super) fn joined(&self, part: impl Fn(&T) -> &Tensor) -> Result<Tensor> {
        let (total, width) = self.tokens.dims();
        let device = self.tokens.targets().device();
        let mut places = vec![0; total];
        for (place, &index) in self.all.iter().flatten().flatten().enumerate() {
            places[index] = place;
        }
        if self.ranks.is_alone() {
            let pieces: Vec<&Tensor> = self.own.iter().map(part).collect();
            let rows = Tensor::cat(&pieces, 0)?;
            if places.is_sorted() {
                return Ok(rows);
            }
            let places: Vec<u32> = places.into_iter().map(|place| place as u32).collect();
            return Ok(rows.index_select(&Tensor::new(places, device)?, 0)?);
        }
        let own = self.all[self.share].iter().filter(|_| self.reports);
        let columns = own.zip(&self.own).map(|(sequences, piece)| {
            let tokens = sequences.iter();
            let tokens = tokens.map(|&index| self.tokens.sequences()[index].response().len());
            Column::from_tensor(part(piece), &tokens.collect::<Vec<_>>())
        });
        let columns = self.ranks.gather(columns.collect::<Result<Vec<_>>>()?)?;
        let column = Column::concat(columns.into_iter().flatten())?;
        column.select(&places)?.padded(width, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// The results are in the order of the batch, each in its dtype.
    #[test]
    fn results_are_in_the_order_of_the_batch() -> Result<()> {
        let pairs: [(&[u32], &[u32]); 4] = [
            (&[1, 2, 3], &[4, 5]),
            (&[7], &[8, 9, 1, 2]),
            (&[1, 2, 3], &[6, 5, 4]),
            (&[7], &[1]),
        ];
        let batch = TokenBatch::new(&pairs, &Device::Cpu)?;
        let micro_batches = MicroBatches {
            size: MicroBatchSize::Tokens(6),
            progress: &crate::progress::NoProgress,
            receiver: &crate::progress::NoProgress,
            ranks: &Ranks::default(),
            gathers: false,
        };
        let targets = micro_batches.map(&batch, |piece| Ok(piece.targets().clone()))?;
        assert_eq!(targets.to_vec2::<u32>()?, batch.targets().to_vec2::<u32>()?);
        Ok(())
    }
}
