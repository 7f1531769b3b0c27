//! Sequences with the tensors of their responses.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_loss::StepTotals;

use super::batch::totals;
use super::{Batch, Column, Sequence, select};

/// B sequences with responses of up to T tokens, and the tensors of their responses.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    sequences: Vec<Sequence>,
    /// u32 `[B, T]`
    targets: Tensor,
    /// u32 `[B, T]`
    response_mask: Tensor,
}

impl TokenBatch {
    /// Creates a batch of (prompt, response) pairs.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no pairs, or a prompt or a response has no tokens.
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

    /// Creates the batch of the sequences of `batch`. Tokens without a weight are not in the
    /// response mask.
    ///
    /// # Errors
    ///
    /// If the device has no memory for it.
    pub fn of_batch(batch: &Batch, device: &Device) -> Result<Self> {
        let sequences = batch.sequences().to_vec();
        let targets = sequences.iter().map(|x| x.response().to_vec()).collect();
        let targets = Column::per_token::<u32>(targets).padded(batch.width(), device)?;
        Self {
            response_mask: targets.clone(),
            sequences,
            targets,
        }
        .with_mask_of_sequences()
    }

    /// Returns this batch for a model that chooses its experts.
    pub(crate) fn without_experts(&self) -> Self {
        let sequences = self.sequences.iter().map(Sequence::without_experts);
        self.clone().with_sequences(sequences.collect())
    }

    /// Returns this batch with sequences of the same tokens and weights.
    pub(crate) fn with_sequences(self, sequences: Vec<Sequence>) -> Self {
        Self { sequences, ..self }
    }

    /// Returns this batch without tokens to train on in the sequences that are not kept.
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
        let rows = self.sequences.iter();
        let rows = rows.map(|sequence| sequence.trained().map(u32::from).collect());
        let mask = Column::per_token::<u32>(rows.collect()).padded(width, self.targets.device())?;
        Ok(Self {
            response_mask: mask,
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

    /// Returns the response mask, u32 `[B, T]`: 1 at tokens of [`Self::targets`] that train, 0
    /// elsewhere, including padding.
    pub fn response_mask(&self) -> &Tensor {
        &self.response_mask
    }

    /// Returns the denominators of a step that is this batch: [`StepTotals::count`] of its mask,
    /// without waiting for the device.
    pub fn totals(&self) -> StepTotals {
        totals(self.sequences.iter().map(Sequence::num_trained_tokens))
    }

    /// Returns the number of sequences (B) and the length of the longest response (T) of the batch
    /// that this one is a part of.
    pub fn dims(&self) -> (usize, usize) {
        (self.sequences.len(), self.targets.dims()[1])
    }

    /// Returns `len` sequences, starting at `start`.
    ///
    /// # Errors
    ///
    /// If there are not as many.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let b = self.sequences.len();
        ensure!(
            len > 0 && start < b && len <= b - start,
            "sequences: {len} from {start} on, there are {b}"
        );
        self.select(&(start..start + len).collect::<Vec<_>>())
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no indices, or one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let selected = select(&self.sequences, sequences)?;
        let rows = rows(sequences, self.targets.device())?;
        Ok(Self {
            sequences: selected,
            targets: self.targets.index_select(&rows, 0)?,
            response_mask: self.response_mask.index_select(&rows, 0)?,
        })
    }
}

/// The indices of sequences, u32.
pub(crate) fn rows(sequences: &[usize], device: &Device) -> Result<Tensor> {
    let rows: Vec<u32> = sequences.iter().map(|&number| number as u32).collect();
    Ok(Tensor::new(rows, device)?)
}

/// Counts the tokens per prompt over an optimizer step.
///
/// Returns, for each sequence, the number of tokens of `batch` that train in all sequences with its
/// prompt, f32 `[B]`, and the number of prompts with a token, for
/// [`StepTotals::prompts`](candle_grpo_loss::StepTotals::prompts). `prompts` has the prompt of each
/// sequence.
///
/// [`Aggregation::PromptMeanTokenMean`](candle_grpo_loss::Aggregation::PromptMeanTokenMean) needs
/// both.
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

    fn three() -> TokenBatch {
        let pairs: [(&[u32], &[u32]); 3] = [(&[1], &[4, 1]), (&[2], &[5]), (&[3], &[6])];
        TokenBatch::new(&pairs, &Device::Cpu).unwrap()
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
        let batch = three().keeping([true, false, true]).unwrap();
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
    fn sequences_that_are_not_there_are_an_error() {
        let tokens = three();
        for (start, len) in [(3, 1), (2, 2), (1, 0), (1, usize::MAX)] {
            let error = tokens.narrow(start, len).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("sequences: {len} from {start} on, there are 3")
            );
        }
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
