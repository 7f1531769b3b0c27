//! The passes over examples that all ranks share.

use anyhow::Result;
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::LanguageModel;

use super::micro_batches::MicroBatchSize;
use super::models::ensure_not_canceled;
use super::{LikelihoodSums, Ranks};
use crate::{Actor, Progress, Sequence};

/// The passes over the examples of an update.
pub(crate) struct ExamplePasses<'a> {
    /// The number of tokens in a pass; a longer example is a pass of its own.
    pub(crate) micro_batch_tokens: usize,
    pub(crate) ranks: &'a Ranks,
    /// The receiver of the progress, which does not cancel here.
    pub(crate) progress: &'a dyn Progress,
    /// Cancels before a pass.
    pub(crate) cancel: &'a dyn Progress,
}

impl<'a> ExamplePasses<'a> {
    /// Passes of `micro_batch_tokens` tokens that `progress` receives and may cancel.
    pub(crate) fn new(
        micro_batch_tokens: usize,
        ranks: &'a Ranks,
        progress: &'a dyn Progress,
    ) -> Self {
        Self {
            micro_batch_tokens,
            ranks,
            progress,
            cancel: progress,
        }
    }

    /// The number of passes of all ranks, and those of this rank.
    pub(crate) fn divide(&self, rows: &[Sequence]) -> (usize, Vec<Vec<Sequence>>) {
        let size = MicroBatchSize::TokensOfRows(self.micro_batch_tokens);
        let mut all = size.of_ranks(rows, self.ranks);
        let count = all.iter().map(Vec::len).sum();
        let own = all.swap_remove(self.ranks.collective().rank()).into_iter();
        let own = own.map(|part| part.into_iter().map(|row| rows[row].clone()).collect());
        (count, own.collect())
    }

    /// Accumulates the gradient of `coef` times the weighted mean of the losses of the tokens of
    /// `rows`, and the load-balancing loss times `coef`. The last pass sums the gradients over all
    /// ranks, so it must be the last one of the optimizer step.
    ///
    /// `passes` are those of [`Self::divide`] for this rank. Returns their sums.
    pub(crate) fn backward<M: LanguageModel>(
        &self,
        actor: &mut Actor<M>,
        rows: &[Sequence],
        passes: &[Vec<Sequence>],
        likelihood: Likelihood,
        coef: f64,
    ) -> Result<Vec<LikelihoodSums>> {
        let weight: f64 = rows.iter().map(|row| row.total_weight()).sum();
        let read: usize = rows.iter().map(|row| row.read_tokens().len()).sum();
        let mut sums = Vec::new();
        for (number, part) in passes.iter().enumerate() {
            ensure_not_canceled(self.cancel)?;
            if number + 1 == passes.len() {
                actor.begin_reduction(self.ranks.collective())?;
            }
            sums.push(actor.forward_backward_examples(
                part,
                likelihood,
                coef / weight,
                read as f64 / coef,
            )?);
            let tokens = part.iter().map(|row| row.num_trained_tokens()).sum();
            self.progress.advance(part.len(), tokens);
        }
        if passes.is_empty() {
            // A rank without rows takes part in the sum of the gradients.
            actor.begin_reduction(self.ranks.collective())?;
            actor.forward_backward_examples(&rows[..1], likelihood, 0., f64::INFINITY)?;
        }
        ensure_not_canceled(self.cancel)?;
        Ok(sums)
    }
}

/// Adds the sums of the passes of all ranks.
pub(crate) fn sum_over_ranks(ranks: &Ranks, own: Vec<LikelihoodSums>) -> Result<LikelihoodSums> {
    let mut total = LikelihoodSums::default();
    for part in ranks.gather(own)?.concat() {
        total.add(&part);
    }
    Ok(total)
}
