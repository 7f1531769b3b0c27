//! Token sequences on the host, and batches that hold them.
//!
//! A completion, a supervised row, a demonstration and a teacher request are each a [`Sequence`]. A
//! [`Batch`] holds sequences and their trajectories. The device receives packed tokens, and the
//! `[B, T]` tensors from [`Column::padded`]. A [`TokenBatch`] holds these tensors for the
//! responses.

mod batch;
mod column;
mod division;
pub(crate) mod response_forward;
mod token_batch;

use std::sync::Arc;

use anyhow::{Result, bail, ensure};

pub use batch::Batch;
pub(crate) use batch::select;
pub use column::Column;
pub(crate) use division::divide;
pub use response_forward::read_tokens;
pub use token_batch::{TokenBatch, count_prompt_tokens};

/// The tokens in a prompt and its response, with each token's weight in a loss. Clones share them.
///
/// A token with weight 0 is only read: the prompt, tool output, or template padding. The policy
/// loss trains equally on all other tokens; the likelihood uses the weights.
///
/// ```
/// use candle_grpo_train::Sequence;
///
/// let sequence = Sequence::of_answer(&[5, 6], &[7, 8, 9])?.with_written(&[true, false, true])?;
/// assert_eq!(sequence.tokens(), [5, 6, 7, 8, 9]);
/// assert_eq!(sequence.weights(), [0., 0., 1., 0., 1.]);
/// assert_eq!((sequence.prompt(), sequence.response()), (&[5, 6][..], &[7, 8, 9][..]));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    tokens: Arc<[u32]>,
    /// The first token's weight is 0, because nothing predicts it.
    weights: Arc<[f32]>,
    /// For each response token, whether it is an observation to predict; absent unless
    /// observations are predicted.
    observed: Option<Arc<[bool]>>,
    prompt_len: usize,
    experts: Option<Arc<[u16]>>,
    weight_versions: Option<Arc<[u64]>>,
    /// Its name; absent if the sequence has no teacher.
    teacher: Option<Arc<str>>,
    teacher_prompt: Option<Arc<[u32]>>,
}

impl Sequence {
    /// Creates a sequence without a prompt that others may share. The first token's weight counts
    /// as 0.
    ///
    /// # Errors
    ///
    /// Fails if there is not one weight for each token, if a weight is negative or not finite, or
    /// if no token after the first one has a weight.
    pub fn new(tokens: Vec<u32>, mut weights: Vec<f32>) -> Result<Self> {
        ensure!(
            tokens.len() == weights.len(),
            "weights: {}, must be one for each of {} tokens",
            weights.len(),
            tokens.len()
        );
        if let Some(at) = weights.iter().position(|&x| !(x >= 0. && x.is_finite())) {
            bail!(
                "weights[{at}]: {}, must be finite and at least 0",
                weights[at]
            );
        }
        if let Some(first) = weights.first_mut() {
            *first = 0.;
        }
        ensure!(
            weights.iter().any(|&weight| weight > 0.),
            "weights: all 0 after the first token, must have a token to learn"
        );
        Ok(Self {
            tokens: tokens.into(),
            weights: weights.into(),
            observed: None,
            prompt_len: 0,
            experts: None,
            weight_versions: None,
            teacher: Some(Arc::default()),
            teacher_prompt: None,
        })
    }

    /// Creates a sequence from a prompt and its answer, whose tokens have weight 1. The answer
    /// should end with a stop token.
    ///
    /// # Errors
    ///
    /// Fails if the answer is empty, or has one token after an empty prompt.
    pub fn of_answer(prompt: &[u32], answer: &[u32]) -> Result<Self> {
        let weights = [vec![0.; prompt.len()], vec![1.; answer.len()]].concat();
        Ok(Self {
            prompt_len: prompt.len(),
            ..Self::new([prompt, answer].concat(), weights)?
        })
    }

    /// Sets response weights to 0 where `written` is false: tokens that the policy did not write,
    /// such as tool output.
    ///
    /// # Errors
    ///
    /// Fails if there is not one value for each response token.
    pub fn with_written(self, written: &[bool]) -> Result<Self> {
        self.ensure_one_each("written", written.len())?;
        let mut weights = self.weights.to_vec();
        for (weight, _) in weights[self.prompt_len..]
            .iter_mut()
            .zip(written)
            .filter(|(_, written)| !**written)
        {
            *weight = 0.;
        }
        Ok(Self {
            weights: weights.into(),
            ..self
        })
    }

    /// Makes the response tokens without a weight observations, which the policy learns to predict
    /// with [`PolicyLoss::observation_coef`](candle_grpo_loss::PolicyLoss::observation_coef). A
    /// sequence in which nothing trains has none: its response only stands for an absent one.
    #[must_use]
    pub fn with_observations(self) -> Self {
        let trains = self.num_trained_tokens() > 0;
        let weights = self.weights.iter().enumerate().skip(self.prompt_len);
        // Nothing predicts the first token.
        let observed = weights.map(|(at, &weight)| trains && weight == 0. && at > 0);
        Self {
            observed: Some(observed.collect()),
            ..self
        }
    }

    /// Sets the experts that a model replays for all tokens but the last one: the same number per
    /// token, one token after the other.
    ///
    /// # Errors
    ///
    /// Fails if a token has no experts, or a different number.
    pub fn with_experts(self, experts: Vec<u16>) -> Result<Self> {
        let read = self.tokens.len().saturating_sub(1);
        let choices = experts.len().checked_div(read).unwrap_or(0);
        ensure!(
            choices > 0 && experts.len() == choices * read,
            "{} experts of {read} tokens, must be as many of each token",
            experts.len()
        );
        Ok(Self {
            experts: Some(experts.into()),
            ..self
        })
    }

    /// Sets the weight version that sampled each response token.
    ///
    /// # Errors
    ///
    /// Fails if there is not one for each response token.
    pub fn with_weight_versions(self, versions: Vec<u64>) -> Result<Self> {
        self.ensure_one_each("weight_versions", versions.len())?;
        Ok(Self {
            weight_versions: Some(versions.into()),
            ..self
        })
    }

    /// Sets the name of the teacher that scores this sequence, or that there is none. By default it
    /// is empty: the name of a single teacher.
    #[must_use]
    pub fn with_teacher(self, name: Option<Arc<str>>) -> Self {
        Self {
            teacher: name,
            ..self
        }
    }

    /// Returns the name of the teacher, if there is one.
    pub fn teacher(&self) -> Option<&str> {
        self.teacher.as_deref()
    }

    /// Sets the prompt tokens that a teacher reads in place of [`Self::prompt`].
    ///
    /// # Errors
    ///
    /// Fails if there are none.
    pub fn with_teacher_prompt(self, prompt: &[u32]) -> Result<Self> {
        ensure!(
            !prompt.is_empty(),
            "teacher_prompt: no tokens, must have at least one"
        );
        Ok(Self {
            teacher_prompt: Some(prompt.into()),
            ..self
        })
    }

    /// Returns this sequence as its teacher reads it: the same response, after the
    /// [prompt of the teacher](Self::with_teacher_prompt) if there is one.
    #[must_use]
    pub fn for_teacher(&self) -> Self {
        let Some(prompt) = &self.teacher_prompt else {
            return self.clone();
        };
        let unweighted = vec![0.; prompt.len()];
        Self {
            tokens: [prompt, self.response()].concat().into(),
            weights: [&unweighted, &self.weights[self.prompt_len..]]
                .concat()
                .into(),
            prompt_len: prompt.len(),
            // They belong to other tokens.
            experts: None,
            ..self.clone()
        }
    }

    /// Returns this sequence without a token to train on, and without observations.
    #[must_use]
    pub fn masked(&self) -> Self {
        let observed = self.observed.as_ref();
        Self {
            weights: vec![0.; self.weights.len()].into(),
            observed: observed.map(|observed| vec![false; observed.len()].into()),
            ..self.clone()
        }
    }

    /// Returns this sequence without replayed experts: the model chooses them.
    #[must_use]
    pub fn without_experts(&self) -> Self {
        Self {
            experts: None,
            ..self.clone()
        }
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the prompt tokens. A pass over several sequences computes a shared prompt once.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len]
    }

    /// Returns the tokens after the prompt.
    pub fn response(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Returns each token's weight in the loss; 0 for tokens that are only read.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Returns whether each response token trains.
    pub fn trained(&self) -> impl Iterator<Item = bool> {
        let weights = self.weights[self.prompt_len..].iter();
        weights.map(|&weight| weight > 0.)
    }

    /// Returns whether each response token is an [observation](Self::with_observations) to predict;
    /// `None` if the sequence has none by construction.
    pub fn observed(&self) -> Option<&[bool]> {
        self.observed.as_deref()
    }

    /// Returns whether the policy loss needs each response token's log-prob: those that train, and
    /// observations.
    pub(crate) fn predicted(&self) -> impl Iterator<Item = bool> {
        let trained = self.trained().enumerate();
        trained.map(|(at, trains)| trains || self.is_observed(at))
    }

    fn is_observed(&self, at: usize) -> bool {
        let observed = self.observed.as_ref();
        observed.is_some_and(|observed| observed[at])
    }

    /// Returns the experts for all tokens but the last one, if a model replays them.
    pub fn experts(&self) -> Option<&[u16]> {
        self.experts.as_deref()
    }

    /// Returns the weight version that sampled each response token, if it is known.
    pub fn weight_versions(&self) -> Option<&[u64]> {
        self.weight_versions.as_deref()
    }

    /// Returns the number of tokens that have a weight.
    pub fn num_trained_tokens(&self) -> usize {
        self.weights.iter().filter(|&&weight| weight > 0.).count()
    }

    /// Returns the summed weights.
    pub fn total_weight(&self) -> f64 {
        self.weights.iter().copied().map(f64::from).sum()
    }

    /// Returns the tokens up to the last one that trains or is an observation. If there is none,
    /// returns the prompt and one token.
    pub fn needed_tokens(&self) -> &[u32] {
        let last = self.weights.iter().rposition(|&weight| weight > 0.);
        let mut observed = self.observed().unwrap_or_default().iter();
        let observed = observed.rposition(|&observed| observed);
        let last = last.max(observed.map(|at| self.prompt_len + at));
        &self.tokens[..=last.unwrap_or(self.prompt_len)]
    }

    /// Returns the tokens that a model reads: those before the last one that trains or is an
    /// observation. If there is none, returns the prompt, or one token.
    pub fn read_tokens(&self) -> &[u32] {
        let needed = self.needed_tokens().len();
        &self.tokens[..(needed - 1).max(1)]
    }

    /// Returns the experts for [`Self::read_tokens`], if a model replays them.
    pub(crate) fn read_experts(&self) -> Option<&[u16]> {
        let experts = self.experts.as_deref()?;
        Some(&experts[..self.read_tokens().len() * self.expert_choices()])
    }

    /// Returns the number of experts per token.
    fn expert_choices(&self) -> usize {
        let read = self.tokens.len().saturating_sub(1);
        let experts = self.experts.as_ref().map_or(0, |experts| experts.len());
        experts.checked_div(read).unwrap_or(0)
    }

    fn ensure_one_each(&self, name: &str, found: usize) -> Result<()> {
        let tokens = self.response().len();
        ensure!(
            found == tokens,
            "{name}: {found}, must be one for each of {tokens} response tokens"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::message;

    #[test]
    fn a_model_reads_the_tokens_before_the_last_one_that_trains() {
        let sequence = Sequence::of_answer(&[1, 2], &[3, 4, 5]).unwrap();
        assert_eq!(sequence.read_tokens(), [1, 2, 3, 4]);
        let cut = sequence
            .clone()
            .with_written(&[true, true, false])
            .unwrap()
            .with_experts(vec![10, 20, 11, 21, 12, 22, 13, 23])
            .unwrap();
        assert_eq!(cut.read_tokens(), [1, 2, 3]);
        assert_eq!(cut.read_experts().unwrap(), [10, 20, 11, 21, 12, 22]);
        assert_eq!(cut.num_trained_tokens(), 2);
        // The prompt, whose states no token needs.
        assert_eq!(sequence.masked().read_tokens(), [1, 2]);
        let row = Sequence::new(vec![1, 2, 3], vec![0., 0.5, 0.]).unwrap();
        assert_eq!(row.read_tokens(), [1]);
        assert_eq!(row.masked().read_tokens(), [1]);
    }

    #[test]
    fn a_teacher_reads_the_response_after_its_own_prompt() {
        let sequence = Sequence::of_answer(&[1, 2], &[3, 4, 5]).unwrap();
        let sequence = sequence.with_written(&[true, false, true]).unwrap();
        let sequence = sequence.with_weight_versions(vec![7, 8, 9]).unwrap();
        assert_eq!(sequence.for_teacher(), sequence);
        let experts = sequence.clone().with_experts(vec![0; 4]).unwrap();
        let read = experts.with_teacher_prompt(&[6, 7, 8]).unwrap();
        assert_eq!(read.prompt(), [1, 2]);
        let read = read.for_teacher();
        assert_eq!(
            (read.prompt(), read.response()),
            (&[6, 7, 8][..], &[3, 4, 5][..])
        );
        assert_eq!(read.weights(), [0., 0., 0., 1., 0., 1.]);
        assert_eq!(read.weight_versions(), Some(&[7, 8, 9][..]));
        assert_eq!(read.experts(), None);
        let masked = sequence.with_teacher_prompt(&[6]).unwrap().masked();
        assert_eq!(masked.for_teacher().read_tokens(), [6]);
        assert_eq!(
            message(masked.with_teacher_prompt(&[])),
            "teacher_prompt: no tokens, must have at least one"
        );
    }

    #[test]
    fn values_that_are_not_one_for_each_token_are_errors() {
        let sequence = Sequence::of_answer(&[1, 2], &[3, 4, 5]).unwrap();
        assert_eq!(
            message(sequence.clone().with_written(&[true])),
            "written: 1, must be one for each of 3 response tokens"
        );
        assert_eq!(
            message(sequence.clone().with_weight_versions(vec![1; 5])),
            "weight_versions: 5, must be one for each of 3 response tokens"
        );
        for experts in [0, 3, 5] {
            assert_eq!(
                message(sequence.clone().with_experts(vec![0; experts])),
                format!("{experts} experts of 4 tokens, must be as many of each token")
            );
        }
    }
}
