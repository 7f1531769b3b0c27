//! Sequences with their trajectories.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use candle_grpo_loss::StepTotals;

use super::Sequence;

/// Sequences, and each one's trajectory.
///
/// A trajectory is one sequence, or several: its turns, if one does not extend the other, or its
/// branches. Anything that compares trajectories, such as a baseline, has one value per trajectory.
/// [`Self::of_sequences`] repeats it for their sequences. In a loss that averages over sequences,
/// [`Self::totals`] and [`Self::trajectory_shares`] make each trajectory count once.
///
/// ```
/// use candle_grpo_train::Sequence;
/// use candle_grpo_train::sequence::Batch;
///
/// let sequences = vec![Sequence::of_answer(&[1], &[2, 3])?, Sequence::of_answer(&[1, 4], &[5])?];
/// let batch = Batch::new(sequences)?.with_trajectories(vec![0, 0])?;
/// assert_eq!(batch.of_sequences(&[0.5])?, [0.5, 0.5]);
/// assert_eq!(batch.totals().sequences, 1.);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Batch {
    sequences: Vec<Sequence>,
    /// Each sequence's trajectory.
    trajectories: Vec<usize>,
}

impl Batch {
    /// Creates a batch in which each sequence is a trajectory.
    ///
    /// # Errors
    ///
    /// Fails if there are no sequences.
    pub fn new(sequences: Vec<Sequence>) -> Result<Self> {
        ensure!(
            !sequences.is_empty(),
            "sequences: none, a batch must have at least one"
        );
        Ok(Self {
            trajectories: (0..sequences.len()).collect(),
            sequences,
        })
    }

    /// Sets each sequence's trajectory, numbered from 0.
    ///
    /// # Errors
    ///
    /// Fails if there is not one for each sequence, or if a trajectory has no sequence.
    pub fn with_trajectories(self, trajectories: Vec<usize>) -> Result<Self> {
        ensure!(
            trajectories.len() == self.sequences.len(),
            "trajectories: {}, must be one for each of {} sequences",
            trajectories.len(),
            self.sequences.len()
        );
        let mut numbers = trajectories.clone();
        numbers.sort_unstable();
        numbers.dedup();
        let mut places = numbers.iter().enumerate();
        if let Some((empty, _)) = places.find(|&(at, &number)| number != at) {
            let last = numbers[numbers.len() - 1];
            anyhow::bail!("trajectories: none is {empty}, must be all from 0 to {last}");
        }
        Ok(Self {
            trajectories,
            ..self
        })
    }

    /// Returns the sequences.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Returns each sequence's trajectory.
    pub fn trajectories(&self) -> &[usize] {
        &self.trajectories
    }

    /// Returns T, the number of tokens in the longest response.
    pub fn width(&self) -> usize {
        let lengths = self.sequences.iter().map(|x| x.response().len());
        lengths.max().unwrap_or(0)
    }

    /// Selects the sequences with these indices, in this order. An index may repeat. Each sequence
    /// keeps its trajectory number.
    ///
    /// # Errors
    ///
    /// Fails if there are no indices, or if one is out of range.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        Ok(Self {
            sequences: select(&self.sequences, sequences)?,
            trajectories: select(&self.trajectories, sequences)?,
        })
    }

    /// Repeats trajectory values, one each, for their sequences.
    ///
    /// # Errors
    ///
    /// Fails if there is not one value for each trajectory.
    pub fn of_sequences<T: Clone>(&self, values: &[T]) -> Result<Vec<T>> {
        let count = self.trajectories.iter().max().map_or(0, |last| last + 1);
        ensure!(
            values.len() >= count,
            "values: {}, must be one for each of {count} trajectories",
            values.len()
        );
        select(values, &self.trajectories)
    }

    /// Returns each sequence's share of the trained tokens in its trajectory. Pass them as
    /// [`token_weights`](candle_grpo_loss::PolicyBatch::token_weights) for a mean over each
    /// sequence's tokens. With [`Self::totals`], a trajectory then counts as if it were one
    /// sequence. Other reductions only need the totals.
    pub fn trajectory_shares(&self) -> Vec<f32> {
        let tokens = self.trajectory_tokens();
        let pairs = self.trajectories.iter().zip(&self.sequences);
        let share = |(trajectory, sequence): (&usize, &Sequence)| {
            sequence.num_trained_tokens() as f32 / (tokens[trajectory] as f32).max(1.)
        };
        pairs.map(share).collect()
    }

    /// Returns the denominators of a step that is this batch, in which a trajectory counts as one
    /// sequence.
    pub fn totals(&self) -> StepTotals {
        totals(self.trajectory_tokens().into_values(), &self.sequences)
    }

    /// The number of tokens that train of each trajectory.
    fn trajectory_tokens(&self) -> BTreeMap<usize, usize> {
        let mut tokens = BTreeMap::new();
        for (trajectory, sequence) in self.trajectories.iter().zip(&self.sequences) {
            *tokens.entry(*trajectory).or_default() += sequence.num_trained_tokens();
        }
        tokens
    }
}

/// A step's denominators from the number of trained tokens in each trajectory, and from the
/// observations in `sequences`.
pub(super) fn totals(
    tokens: impl IntoIterator<Item = usize>,
    sequences: &[Sequence],
) -> StepTotals {
    let observed = sequences.iter().map(|sequence| {
        let observed = sequence.observed()?.iter();
        Some(observed.filter(|&&observed| observed).count() as f64)
    });
    let mut totals = StepTotals {
        observations: observed.sum(),
        ..StepTotals::default()
    };
    for tokens in tokens {
        totals.tokens += tokens as f64;
        totals.sequences += f64::from(u8::from(tokens > 0));
        totals.rows += 1.;
    }
    totals
}

/// Returns the items with these indices.
pub(crate) fn select<T: Clone>(items: &[T], indices: &[usize]) -> Result<Vec<T>> {
    ensure!(!indices.is_empty(), "sequences: none, must be at least one");
    let found = indices.iter().map(|&index| {
        let item = items.get(index).cloned();
        item.with_context(|| format!("sequences: {index}, there are {}", items.len()))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::message;

    fn batch() -> Batch {
        let sequence = |answer: &[u32]| Sequence::of_answer(&[1], answer).unwrap();
        let sequences = vec![sequence(&[2, 3]), sequence(&[4]), sequence(&[5, 6, 7])];
        Batch::new(sequences).unwrap()
    }

    #[test]
    fn sequences_are_selected_with_their_trajectories() {
        let part = batch().select(&[2, 0, 2]).unwrap();
        assert_eq!(part.trajectories(), [2, 0, 2]);
        assert_eq!(part.sequences()[1], batch().sequences()[0]);
        assert_eq!((batch().width(), part.width()), (3, 3));
        assert_eq!(batch().select(&[1]).unwrap().width(), 1);
    }

    #[test]
    fn indices_and_trajectories_that_do_not_fit_are_errors() {
        assert_eq!(message(batch().select(&[3])), "sequences: 3, there are 3");
        assert_eq!(
            message(batch().with_trajectories(vec![0, 2, 2])),
            "trajectories: none is 1, must be all from 0 to 2"
        );
        let error = message(batch().with_trajectories(vec![0, 1, usize::MAX]));
        assert!(
            error.starts_with("trajectories: none is 2, must be"),
            "{error}"
        );
    }

    #[test]
    fn a_trajectory_counts_as_one_sequence() {
        let batch = batch().with_trajectories(vec![1, 0, 1]).unwrap();
        assert_eq!(batch.of_sequences(&[0.5, 2.]).unwrap(), [2., 0.5, 2.]);
        assert_eq!(batch.trajectory_shares(), [0.4, 1., 0.6]);
        let totals = batch.totals();
        assert_eq!((totals.tokens, totals.sequences, totals.rows), (6., 2., 2.));
        let error = message(batch.of_sequences(&[0.5]));
        assert_eq!(error, "values: 1, must be one for each of 2 trajectories");
    }
}
