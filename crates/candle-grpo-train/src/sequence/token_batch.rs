//! Sequences with their response tensors.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_loss::StepTotals;
use candle_grpo_nn::SequenceRanks;

use super::batch::totals;
use super::{Batch, Column, Sequence, select};

/// B sequences with responses up to T tokens long, and their response tensors.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    sequences: Vec<Sequence>,
    /// u32 `[B, T]`
    targets: Tensor,
    /// u32 `[B, T]`
    response_mask: Tensor,
    /// u32 `[B, T]`
    observation_mask: Option<Tensor>,
    /// The ranks that divide the tokens of each sequence in passes, if any.
    ranks: Option<SequenceRanks>,
}

impl TokenBatch {
    /// Creates a batch from (prompt, response) pairs.
    ///
    /// # Errors
    ///
    /// Fails if there are no pairs, or if a prompt or a response has no tokens.
    pub fn new(pairs: &[(&[u32], &[u32])], device: &Device) -> Result<Self> {
        let sequences = pairs.iter().enumerate().map(|(i, (prompt, response))| {
            ensure!(
                !prompt.is_empty() && !response.is_empty(),
                "sequence {i}: {} prompt tokens and {} response tokens, must have at least one of each",
                prompt.len(),
                response.len()
            );
            Sequence::of_answer(prompt, response)
        });
        Self::of_batch(&Batch::new(sequences.collect::<Result<_>>()?)?, device)
    }

    /// Creates a batch from the sequences in `batch`. Tokens without a weight are not in the
    /// response mask.
    ///
    /// # Errors
    ///
    /// Fails if the device runs out of memory.
    pub fn of_batch(batch: &Batch, device: &Device) -> Result<Self> {
        let sequences = batch.sequences().to_vec();
        let targets = sequences.iter().map(|x| x.response().to_vec()).collect();
        let targets = Column::per_token::<u32>(targets).padded(batch.width(), device)?;
        Self {
            response_mask: targets.clone(),
            observation_mask: None,
            ranks: None,
            sequences,
            targets,
        }
        .with_mask_of_sequences()
    }

    /// Returns this batch without replayed experts: the model chooses them.
    pub(crate) fn without_experts(&self) -> Self {
        self.with_sequences(self.sequences.iter().map(Sequence::without_experts))
    }

    /// Returns the sequences of the teacher with this name as it reads them
    /// ([`Sequence::for_teacher`]), and their indices. `None` if it has none.
    pub(crate) fn for_teacher(&self, name: &str) -> Result<Option<(Self, Vec<usize>)>> {
        let taught = self.sequences.iter().enumerate();
        let taught = taught.filter(|(_, sequence)| sequence.teacher() == Some(name));
        let rows: Vec<usize> = taught.map(|(row, _)| row).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let read = self.select(&rows)?;
        let read = read.with_sequences(read.sequences.iter().map(Sequence::for_teacher));
        Ok(Some((read, rows)))
    }

    /// Returns `x` `[R, ..]` of the sequences with these indices as values of all, `[B, ..]`, with
    /// 0 for the others.
    pub(crate) fn spread(&self, x: &Tensor, rows: &[usize]) -> candle_core::Result<Tensor> {
        let total = self.sequences.len();
        if rows.iter().copied().eq(0..total) {
            return Ok(x.clone());
        }
        // The row after the last one is 0.
        let zero = x.narrow(0, 0, 1)?.zeros_like()?;
        let mut places = vec![rows.len() as u32; total];
        for (place, &row) in rows.iter().enumerate() {
            places[row] = place as u32;
        }
        let places = Tensor::new(places, x.device())?;
        Tensor::cat(&[x, &zero], 0)?.index_select(&places, 0)
    }

    /// Returns the response mask of the sequences for which `counts` is true.
    pub(crate) fn mask_of(&self, counts: impl Fn(&Sequence) -> bool) -> Result<Tensor> {
        if self.sequences.iter().all(&counts) {
            return Ok(self.response_mask.clone());
        }
        let counts = self
            .sequences
            .iter()
            .map(|sequence| u32::from(counts(sequence)));
        let counts: Vec<u32> = counts.collect();
        let counts = Tensor::new(counts, self.targets.device())?.unsqueeze(1)?;
        Ok(self.response_mask.broadcast_mul(&counts)?)
    }

    /// Returns whether a token that trains has a teacher.
    pub(crate) fn has_teacher(&self) -> bool {
        self.trained_teachers().next().is_some()
    }

    /// Checks that the teacher of each sequence with a token that trains is one of `given`.
    pub(crate) fn ensure_teachers<'a>(&self, given: impl Iterator<Item = &'a str>) -> Result<()> {
        let given: Vec<&str> = given.collect();
        let unknown = self
            .trained_teachers()
            .find(|(_, name)| !given.contains(name));
        if let Some((row, name)) = unknown {
            bail!("sequence {row}: its teacher is {name:?}, must be absent or one of {given:?}");
        }
        Ok(())
    }

    /// Returns whether a token that trains has the teacher with this name.
    pub(crate) fn is_taught_by(&self, name: &str) -> bool {
        self.trained_teachers().any(|(_, own)| own == name)
    }

    /// Returns the sequences with a token that trains and a teacher: their indices, and the
    /// teacher's name.
    fn trained_teachers(&self) -> impl Iterator<Item = (usize, &str)> {
        let sequences = self.sequences.iter().enumerate();
        let trained = sequences.filter(|(_, sequence)| sequence.num_trained_tokens() > 0);
        trained.filter_map(|(row, sequence)| Some((row, sequence.teacher()?)))
    }

    /// Returns this batch with `sequences`, which have the same responses with the same weights.
    pub(crate) fn with_sequences(&self, sequences: impl IntoIterator<Item = Sequence>) -> Self {
        Self {
            sequences: sequences.into_iter().collect(),
            targets: self.targets.clone(),
            response_mask: self.response_mask.clone(),
            observation_mask: self.observation_mask.clone(),
            ranks: self.ranks.clone(),
        }
    }

    /// Lets `ranks` divide the tokens of each sequence in passes over this batch: all of them must
    /// run the same passes, and get the whole results.
    #[must_use]
    pub(crate) fn divided(self, ranks: Option<&SequenceRanks>) -> Self {
        Self {
            ranks: ranks.cloned(),
            ..self
        }
    }

    /// Returns the ranks that divide the tokens of each sequence, if any.
    pub(crate) fn ranks(&self) -> Option<&SequenceRanks> {
        self.ranks.as_ref()
    }

    /// Makes the response tokens that do not train observations: [`Sequence::with_observations`].
    pub(crate) fn with_observations(mut self) -> Result<Self> {
        let sequences = self.sequences.into_iter();
        self.sequences = sequences.map(Sequence::with_observations).collect();
        self.with_mask_of_sequences()
    }

    /// Returns this batch without trained tokens in sequences that are not kept.
    pub(crate) fn keeping(mut self, keep: impl IntoIterator<Item = bool>) -> Result<Self> {
        for (sequence, keep) in self.sequences.iter_mut().zip(keep) {
            if !keep {
                *sequence = sequence.masked();
            }
        }
        self.with_mask_of_sequences()
    }

    fn with_mask_of_sequences(self) -> Result<Self> {
        let (_, width) = self.dims();
        let mask = |rows| Column::per_token::<u32>(rows).padded(width, self.targets.device());
        let rows = self.sequences.iter();
        let trained = rows.map(|sequence| sequence.trained().map(u32::from).collect());
        let response_mask = mask(trained.collect())?;
        let rows = self.sequences.iter().map(Sequence::observed);
        let observed = rows.map(|row| Some(row?.iter().copied().map(u32::from).collect()));
        let observed: Option<Vec<Vec<u32>>> = observed.collect();
        let observation_mask = observed.map(mask).transpose()?;
        Ok(Self {
            response_mask,
            observation_mask,
            ..self
        })
    }

    /// Returns the sequences.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Returns the response tokens, u32 `[B, T]`.
    pub fn targets(&self) -> &Tensor {
        &self.targets
    }

    /// Returns the response mask, u32 `[B, T]`: 1 at trained tokens in [`Self::targets`], 0
    /// elsewhere, including padding.
    pub fn response_mask(&self) -> &Tensor {
        &self.response_mask
    }

    /// Returns the observations, u32 `[B, T]`: 1 at [observed](Sequence::with_observations) tokens
    /// in [`Self::targets`]. `None` if the sequences have none by construction.
    pub fn observation_mask(&self) -> Option<&Tensor> {
        self.observation_mask.as_ref()
    }

    /// Returns the tokens whose log-probs the policy loss needs, u32 `[B, T]`: those in the
    /// response mask, and observations.
    pub(crate) fn predicted_mask(&self) -> Result<Tensor> {
        Ok(match &self.observation_mask {
            None => self.response_mask.clone(),
            Some(observed) => (&self.response_mask + observed)?,
        })
    }

    /// Returns the denominators for a step that consists of this batch: [`StepTotals::count`] for
    /// its masks, without waiting for the device.
    pub fn totals(&self) -> StepTotals {
        let tokens = self.sequences.iter().map(Sequence::num_trained_tokens);
        totals(tokens, &self.sequences)
    }

    /// Returns B, the number of sequences, and T, the longest response in the batch that this one
    /// is part of.
    pub fn dims(&self) -> (usize, usize) {
        (self.sequences.len(), self.targets.dims()[1])
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Fails if there are no indices, or if one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        Ok(self.select_with_rows(sequences)?.0)
    }

    /// [`Self::select`], with the indices as a tensor on the device, u32.
    pub(crate) fn select_with_rows(&self, sequences: &[usize]) -> Result<(Self, Tensor)> {
        let selected = select(&self.sequences, sequences)?;
        let rows: Vec<u32> = sequences.iter().map(|&number| number as u32).collect();
        let rows = Tensor::new(rows, self.targets.device())?;
        let batch = Self {
            sequences: selected,
            targets: self.targets.index_select(&rows, 0)?,
            response_mask: self.response_mask.index_select(&rows, 0)?,
            observation_mask: match &self.observation_mask {
                Some(mask) => Some(mask.index_select(&rows, 0)?),
                None => None,
            },
            ranks: self.ranks.clone(),
        };
        Ok((batch, rows))
    }
}

/// Counts tokens per prompt over an optimizer step.
///
/// `prompts` holds each sequence's prompt. Returns two values that
/// [`Aggregation::PromptMeanTokenMean`](candle_grpo_loss::Aggregation::PromptMeanTokenMean) needs.
/// The first is, for each sequence, the number of trained tokens in `batch` over all sequences with
/// its prompt, f32 `[B]`. The second is the number of prompts with a trained token, for
/// [`StepTotals::prompts`](candle_grpo_loss::StepTotals::prompts).
pub fn count_prompt_tokens(batch: &TokenBatch, prompts: &[usize]) -> Result<(Tensor, f64)> {
    let (b, _) = batch.dims();
    ensure!(
        b == prompts.len(),
        "prompts: {} for {b} sequences, there must be one for each",
        prompts.len()
    );
    let mut tokens_by_prompt: BTreeMap<usize, f32> = BTreeMap::new();
    for (&prompt, sequence) in prompts.iter().zip(batch.sequences()) {
        *tokens_by_prompt.entry(prompt).or_default() += sequence.num_trained_tokens() as f32;
    }
    let counts: Vec<f32> = prompts
        .iter()
        .map(|prompt| tokens_by_prompt[prompt])
        .collect();
    let counting = tokens_by_prompt
        .values()
        .filter(|&&tokens| tokens > 0.)
        .count();
    Ok((
        Tensor::new(counts, batch.targets().device())?,
        counting as f64,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::message;

    fn rows(x: &Tensor) -> Vec<Vec<u32>> {
        x.to_vec2().unwrap()
    }

    #[test]
    fn responses_are_padded_on_the_right() {
        let pairs: [(&[u32], &[u32]); 2] = [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        assert_eq!(rows(batch.targets()), [[4, 0, 0], [6, 7, 8]]);
        assert_eq!(rows(batch.response_mask()), [[1, 0, 0], [1, 1, 1]]);
        assert_eq!(batch.dims(), (2, 3));
        let kept = batch.keeping([true, false]).unwrap();
        assert_eq!(rows(kept.response_mask()), [[1, 0, 0], [0, 0, 0]]);
    }

    #[test]
    fn the_totals_are_those_of_the_mask() {
        let pairs: [(&[u32], &[u32]); 3] = [(&[1], &[4, 1]), (&[2], &[5]), (&[3], &[6])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let batch = batch.keeping([true, false, true]).unwrap();
        let counted = StepTotals::count(batch.response_mask()).unwrap();
        assert_eq!(batch.totals(), counted);
        assert_eq!(
            (counted.tokens, counted.sequences, counted.rows),
            (3., 2., 3.)
        );
    }

    #[test]
    fn tokens_are_counted_by_prompt() {
        let pairs: [(&[u32], &[u32]); 5] = [
            (&[1], &[2, 3]),
            (&[1], &[2]),
            (&[1], &[2]),
            (&[1], &[2, 3]),
            (&[1], &[2]),
        ];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let batch = batch.keeping([true, true, false, true, false]).unwrap();
        let (tokens, prompts) = count_prompt_tokens(&batch, &[7, 3, 3, 7, 5]).unwrap();
        assert_eq!(tokens.to_vec1::<f32>().unwrap(), [4., 1., 1., 4., 0.]);
        assert_eq!(prompts, 2.);
        let error = count_prompt_tokens(&batch, &[1]).unwrap_err().to_string();
        assert!(error.starts_with("prompts: 1 for 5 sequences"), "{error}");
    }

    #[test]
    fn empty_batches_and_sequences_are_errors() {
        let error = |pairs: &[(&[u32], &[u32])]| message(TokenBatch::new(pairs, &Device::Cpu));
        assert_eq!(
            error(&[]),
            "sequences: none, a batch must have at least one"
        );
        let pairs: [(&[u32], &[u32]); 2] = [(&[1], &[2]), (&[1, 1], &[])];
        assert_eq!(
            error(&pairs),
            "sequence 1: 2 prompt tokens and 0 response tokens, must have at least one of each"
        );
    }
}
