//! Completions of prompts.

use std::borrow::Cow;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use candle_grpo_rewards::FinishReason;

use super::episode::Episode;
use crate::Sequence;

/// The tokens that a [`Generator`](crate::Generator) drew after one prompt. All vectors but
/// [`experts`](Self::experts) have one entry per token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The tokens, including a stop token and those of a stop string.
    pub tokens: Vec<u32>,
    /// The log-probability of each token under the distribution that it was drawn from, after
    /// temperature, top-k, top-p and min-p; 0 for greedy decoding.
    pub drawn_log_probs: Vec<f32>,
    /// The log-probability of each token under the policy at the temperature of sampling,
    /// `softmax(logits / temperature)` over all tokens. `None` if the generator cannot compute
    /// them.
    pub log_probs: Option<Vec<f32>>,
    /// False for tokens that the policy did not write, such as the output of a tool. They are
    /// context and never trained on; their log-probabilities are ignored. `None` if the policy
    /// wrote all tokens.
    pub written: Option<Vec<bool>>,
    /// The version of the weights that drew each token:
    /// [`PolicyWeights::version`](super::PolicyWeights::version).
    pub weight_versions: Vec<u64>,
    /// The reason why it ended.
    pub finish_reason: FinishReason,
    /// The experts that the routers of the model chose for each token that it read: those of the
    /// prompt and of the completion, except for the last one. A token has as many entries as
    /// [`Decoder::expert_choices`](candle_grpo_nn::Decoder::expert_choices). `None` unless
    /// [`GenerationBatch::records_experts`](super::GenerationBatch::records_experts).
    pub experts: Option<Vec<u16>>,
}

impl Completion {
    /// Checks a completion of a model with `vocab_size` tokens.
    ///
    /// # Errors
    ///
    /// If there are no tokens, a token is not below `vocab_size`, lengths differ, a log-probability
    /// is above 0 or not finite, or the policy wrote none of the tokens.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        let length = self.tokens.len();
        ensure!(length > 0, "tokens: none, must be at least one");
        if let Some(at) = self.tokens.iter().position(|&t| t as usize >= vocab_size) {
            anyhow::bail!(
                "tokens: {} at {at}, must be below the vocabulary size {vocab_size}",
                self.tokens[at]
            );
        }
        let lengths = [
            ("drawn_log_probs", Some(self.drawn_log_probs.len())),
            ("log_probs", self.log_probs.as_ref().map(Vec::len)),
            ("written", self.written.as_ref().map(Vec::len)),
            ("weight_versions", Some(self.weight_versions.len())),
        ];
        for (name, found) in lengths {
            let found = found.unwrap_or(length);
            ensure!(
                found == length,
                "{name}: {found} entries, must be {length}, one per token"
            );
        }
        ensure!(
            (0..length).any(|at| self.is_written(at)),
            "written: false for all tokens, must be true for at least one"
        );
        for (name, log_probs) in [
            ("drawn_log_probs", Some(&self.drawn_log_probs)),
            ("log_probs", self.log_probs.as_ref()),
        ] {
            for (at, &log_prob) in log_probs.into_iter().flatten().enumerate() {
                ensure!(
                    !self.is_written(at) || log_prob.is_finite() && log_prob <= ROUNDING,
                    "{name}: {log_prob} at {at}, must be finite and at most 0"
                );
            }
        }
        Ok(())
    }

    /// Returns the sequence of a prompt and this completion, of which the tokens that the policy
    /// wrote train.
    ///
    /// # Errors
    ///
    /// If prompt or completion have no tokens, or the entries of the completion are not one per
    /// token.
    pub fn sequence(&self, prompt: &[u32]) -> Result<Sequence> {
        ensure!(
            !prompt.is_empty() && !self.tokens.is_empty(),
            "{} prompt tokens and {} response tokens, must have at least one of each",
            prompt.len(),
            self.tokens.len()
        );
        let sequence = Sequence::of_answer(prompt, &self.tokens)?
            .with_weight_versions(self.weight_versions.clone())?;
        match &self.written {
            Some(written) => sequence.with_written(written),
            None => Ok(sequence),
        }
    }

    /// The log-probs of the generator: those of the policy, or of the distribution drawn from if it
    /// does not compute these. 0 for tokens that the policy did not write.
    pub(crate) fn reported_log_probs(&self) -> Vec<f32> {
        let log_probs = self.log_probs.as_ref();
        let log_probs = log_probs.unwrap_or(&self.drawn_log_probs).iter();
        let reported = log_probs.enumerate().map(
            |(at, &log_prob)| {
                if self.is_written(at) { log_prob } else { 0. }
            },
        );
        reported.collect()
    }

    /// Returns the tokens that the policy wrote.
    pub(crate) fn written_tokens(&self) -> Cow<'_, [u32]> {
        match &self.written {
            None => Cow::Borrowed(&self.tokens),
            Some(written) => {
                let all = self.tokens.iter().zip(written);
                all.filter_map(|(token, written)| written.then_some(*token))
                    .collect()
            }
        }
    }

    /// Returns true if the policy wrote the token at `at`.
    pub(crate) fn is_written(&self, at: usize) -> bool {
        self.written.as_ref().is_none_or(|written| written[at])
    }
}

/// Rounding of a log-softmax in low precision may exceed 0 by this much.
const ROUNDING: f32 = 1e-2;

/// One completion of one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// [`crate::Prompt::index`] of its prompt.
    pub prompt_index: u64,
    /// The number of the completion among those of the prompt. It keeps counting if a prompt
    /// occurs again in a step.
    pub sample_index: usize,
    /// The tokens of the prompt.
    pub prompt_tokens: Vec<u32>,
    /// The completion. With an environment it has all turns of the trajectory.
    pub completion: Completion,
    /// The turns of the trajectory, if there is an environment.
    pub episode: Option<Episode>,
    /// The other rows of a trajectory that branches. Each token that the policy drew is written in
    /// exactly one row; in others it may be part of the prompt.
    #[serde(default)]
    pub branches: Vec<Row>,
}

/// A prompt and a completion of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The tokens of the prompt.
    pub prompt_tokens: Vec<u32>,
    /// The completion.
    pub completion: Completion,
}

impl Rollout {
    /// Returns the prompt and the completion of each row: [`Self::branches`], and the one with the
    /// last turn. Each is a sequence of the trajectory.
    pub fn rows(&self) -> impl Iterator<Item = (&[u32], &Completion)> {
        let branches = self.branches.iter();
        let branches = branches.map(|row| (row.prompt_tokens.as_slice(), &row.completion));
        branches.chain([(self.prompt_tokens.as_slice(), &self.completion)])
    }

    /// Returns the number of tokens of all completions.
    pub(crate) fn response_length(&self) -> usize {
        self.rows().map(|(_, row)| row.tokens.len()).sum()
    }

    /// Returns the number of tokens that the policy wrote.
    pub(crate) fn num_written_tokens(&self) -> usize {
        self.rows().map(|(_, row)| row.written_tokens().len()).sum()
    }

    /// Returns the number of tokens of all prompts and completions that the policy did not write.
    pub(crate) fn num_read_tokens(&self) -> usize {
        let prompts: usize = self.rows().map(|(prompt, _)| prompt.len()).sum();
        prompts + self.response_length() - self.num_written_tokens()
    }

    /// The message of the environment, if it failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.episode.as_ref()?.failure()
    }

    /// The tokens of the last turn: all tokens without an environment.
    pub(crate) fn last_turn(&self) -> &[u32] {
        let turns = self.episode.iter().flat_map(|episode| &episode.turns);
        match turns.last() {
            Some(turn) => &self.completion.tokens[turn.tokens.clone()],
            None => &self.completion.tokens,
        }
    }
}
