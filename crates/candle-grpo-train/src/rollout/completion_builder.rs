//! Completions that grow turn by turn.

use std::ops::Range;

use super::{Completion, FinishReason};

/// A prompt and a growing completion: policy turns, with context between them. No token is ever
/// encoded again.
///
/// ```
/// use candle_grpo_train::FinishReason;
/// use candle_grpo_train::rollout::{Completion, CompletionBuilder};
///
/// let turn = Completion {
///     tokens: vec![5],
///     drawn_log_probs: vec![-0.5],
///     log_probs: None,
///     written: None,
///     weight_versions: vec![3],
///     finish_reason: FinishReason::StopToken,
///     experts: None,
/// };
/// let mut row = CompletionBuilder::new(vec![1, 2]);
/// row.push(&turn);
/// row.append(&[7]);
/// row.push(&turn);
/// assert_eq!(row.tokens(), [1, 2, 5, 7, 5]);
/// let (prompt, completion) = row.into_parts();
/// assert_eq!((prompt, completion.tokens), (vec![1, 2], vec![5, 7, 5]));
/// assert_eq!(completion.written, Some(vec![true, false, true]));
/// ```
#[derive(Debug, Clone)]
pub struct CompletionBuilder {
    /// The prompt and the completion.
    tokens: Vec<u32>,
    prompt_len: usize,
    drawn_log_probs: Vec<f32>,
    log_probs: Option<Vec<f32>>,
    written: Vec<bool>,
    weight_versions: Vec<u64>,
    finish_reason: FinishReason,
    experts: Option<Vec<u16>>,
}

impl CompletionBuilder {
    /// Starts after a prompt.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt_len: prompt.len(),
            tokens: prompt,
            drawn_log_probs: Vec::new(),
            log_probs: Some(Vec::new()),
            written: Vec::new(),
            weight_versions: Vec::new(),
            finish_reason: FinishReason::Length,
            experts: None,
        }
    }

    /// Creates the completion of a trajectory without a policy turn: one token of context, because
    /// a completion cannot be empty.
    pub fn without_turns(prompt: Vec<u32>) -> Self {
        let last = prompt.last().copied().unwrap_or(0);
        let mut row = Self::new(prompt);
        row.append(&[last]);
        row
    }

    /// Returns the prompt and completion tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of prompt tokens.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Returns the number of completion tokens.
    pub fn len(&self) -> usize {
        self.written.len()
    }

    /// Returns true if the completion has no tokens.
    pub fn is_empty(&self) -> bool {
        self.written.is_empty()
    }

    /// Appends a policy turn. Returns its token range in the completion.
    pub fn push(&mut self, turn: &Completion) -> Range<usize> {
        let from = self.len();
        self.tokens.extend(&turn.tokens);
        self.drawn_log_probs.extend(&turn.drawn_log_probs);
        match (&mut self.log_probs, &turn.log_probs) {
            (Some(all), Some(more)) => all.extend(more),
            _ => self.log_probs = None,
        }
        let written = (0..turn.tokens.len()).map(|at| turn.is_written(at));
        self.written.extend(written);
        self.weight_versions.extend(&turn.weight_versions);
        // The turn's experts include those for the tokens before it.
        self.experts.clone_from(&turn.experts);
        self.finish_reason = turn.finish_reason;
        from..self.len()
    }

    /// Appends context: tokens that the policy did not write.
    pub fn append(&mut self, tokens: &[u32]) {
        let length = self.len() + tokens.len();
        let version = self.weight_versions.last().copied().unwrap_or(0);
        self.tokens.extend(tokens);
        self.written.resize(length, false);
        self.drawn_log_probs.resize(length, 0.);
        if let Some(log_probs) = &mut self.log_probs {
            log_probs.resize(length, 0.);
        }
        self.weight_versions.resize(length, version);
    }

    /// Sets the reason why the completion ended. By default, it is the last turn's.
    pub fn finish(&mut self, reason: FinishReason) {
        self.finish_reason = reason;
    }

    /// Returns the prompt tokens and the completion.
    pub fn into_parts(mut self) -> (Vec<u32>, Completion) {
        let all_written = self.written.iter().all(|written| *written);
        let response = self.tokens.split_off(self.prompt_len);
        let completion = Completion {
            tokens: response,
            drawn_log_probs: self.drawn_log_probs,
            log_probs: self.log_probs,
            written: (!all_written).then_some(self.written),
            weight_versions: self.weight_versions,
            finish_reason: self.finish_reason,
            experts: self.experts,
        };
        (self.tokens, completion)
    }
}
