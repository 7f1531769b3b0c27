//! Prompt completions.

use std::borrow::Cow;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use candle_grpo_rewards::FinishReason;

use super::CompletionSeed;
use super::episode::Episode;
use crate::{Prompt, Sequence};

/// The tokens that a [`Generator`](crate::Generator) sampled after one prompt. Every vector except
/// [`experts`](Self::experts) has one entry per token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The tokens, including a stop token or a stop string's tokens.
    pub tokens: Vec<u32>,
    /// Each token's log-prob under the distribution that it was sampled from, after temperature,
    /// top-k, top-p and min-p; 0 for greedy decoding.
    pub drawn_log_probs: Vec<f32>,
    /// Each token's log-prob under the policy at the sampling temperature,
    /// `softmax(logits / temperature)` over all tokens. `None` if the generator cannot compute
    /// them.
    pub log_probs: Option<Vec<f32>>,
    /// False for tokens that the policy did not write, such as tool output. They are context and
    /// never trained on, and their log-probs are ignored. `None` if the policy wrote all tokens.
    pub written: Option<Vec<bool>>,
    /// The weight version that sampled each token:
    /// [`PolicyWeights::version`](super::PolicyWeights::version).
    pub weight_versions: Vec<u64>,
    /// The reason why it ended.
    pub finish_reason: FinishReason,
    /// The experts that the model's routers chose for each token that it read: all prompt and
    /// completion tokens except the last one. Each token has
    /// [`Decoder::expert_choices`](candle_grpo_nn::Decoder::expert_choices) entries. `None` unless
    /// [`GenerationBatch::records_experts`](super::GenerationBatch::records_experts).
    pub experts: Option<Vec<u16>>,
}

impl Completion {
    /// Checks a completion for a model with `vocab_size` tokens.
    ///
    /// # Errors
    ///
    /// Fails if there are no tokens, a token is not below `vocab_size`, lengths differ, a log-prob
    /// is above 0 or not finite, or the policy wrote no token.
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

    /// Returns the sequence of `prompt` and this completion. Tokens that the policy wrote train.
    ///
    /// # Errors
    ///
    /// Fails if prompt or completion have no tokens, or if the completion does not have one entry
    /// per token.
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

    /// Returns the generator's log-probs: the policy's or, if it does not compute these, the
    /// sampling distribution's. 0 for tokens that the policy did not write.
    ///
    /// # Errors
    ///
    /// Fails if there is not one per token.
    pub(crate) fn reported_log_probs(&self) -> Result<Vec<f32>> {
        let log_probs = self.log_probs.as_ref().unwrap_or(&self.drawn_log_probs);
        let (found, length) = (log_probs.len(), self.tokens.len());
        ensure!(
            found == length,
            "log_probs: {found} entries, must be {length}, one per token"
        );
        let reported =
            log_probs.iter().enumerate().map(
                |(at, &log_prob)| {
                    if self.is_written(at) { log_prob } else { 0. }
                },
            );
        Ok(reported.collect())
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

/// In low precision, a rounded log-softmax may exceed 0 by this much.
const ROUNDING: f32 = 1e-2;

/// One completion for one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Its prompt's [`crate::Prompt::index`].
    pub prompt_index: u64,
    /// The completion's number among those for the prompt. It keeps counting if a prompt occurs
    /// again in a step.
    pub sample_index: usize,
    /// Prompt tokens.
    pub prompt_tokens: Vec<u32>,
    /// The completion. With an environment, it holds all turns in the trajectory.
    pub completion: Completion,
    /// The role that the policy plays in this row, if it plays several.
    #[serde(default)]
    pub role: Option<String>,
    /// The trajectory's turns, if there is an environment.
    pub episode: Option<Episode>,
    /// The other rows in a branching trajectory. Each token that the policy sampled is written in
    /// exactly one row; in others, it may be part of the prompt.
    #[serde(default)]
    pub branches: Vec<Row>,
}

/// A prompt and its completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Prompt tokens.
    pub prompt_tokens: Vec<u32>,
    /// The completion.
    pub completion: Completion,
    /// The role that the policy plays, see [`Rollout::role`].
    #[serde(default)]
    pub role: Option<String>,
}

impl Rollout {
    /// Creates a rollout of one turn after `prompt`.
    pub(crate) fn single(seed: CompletionSeed, prompt: &Prompt, completion: Completion) -> Self {
        Self {
            prompt_index: prompt.index,
            sample_index: seed.sample as usize,
            prompt_tokens: prompt.tokens.clone(),
            completion,
            role: None,
            episode: None,
            branches: Vec::new(),
        }
    }

    /// Returns each row's prompt and completion: first [`Self::branches`], then the row with the
    /// last turn. Each is a sequence of the trajectory.
    pub fn rows(&self) -> impl Iterator<Item = (&[u32], &Completion)> {
        let branches = self.branches.iter();
        let branches = branches.map(|row| (row.prompt_tokens.as_slice(), &row.completion));
        branches.chain([(self.prompt_tokens.as_slice(), &self.completion)])
    }

    /// Returns each row's role, in the order of [`Self::rows`].
    pub(crate) fn roles(&self) -> impl Iterator<Item = Option<&str>> {
        let branches = self.branches.iter().map(|row| row.role.as_deref());
        branches.chain([self.role.as_deref()])
    }

    /// Returns the number of tokens in all completions.
    pub(crate) fn response_length(&self) -> usize {
        self.rows().map(|(_, row)| row.tokens.len()).sum()
    }

    /// Returns the number of tokens that the policy wrote.
    pub(crate) fn num_written_tokens(&self) -> usize {
        self.rows().map(|(_, row)| row.written_tokens().len()).sum()
    }

    /// Returns the number of tokens that the policy did not write, in all prompts and completions.
    pub(crate) fn num_read_tokens(&self) -> usize {
        let prompts: usize = self.rows().map(|(prompt, _)| prompt.len()).sum();
        prompts + self.response_length() - self.num_written_tokens()
    }

    /// Returns the environment's message, if it failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.episode.as_ref()?.failure()
    }

    /// Returns the last turn's tokens; without an environment, all tokens.
    pub(crate) fn last_turn(&self) -> &[u32] {
        let turns = self.episode.iter().flat_map(|episode| &episode.turns);
        match turns.last() {
            Some(turn) => &self.completion.tokens[turn.tokens.clone()],
            None => &self.completion.tokens,
        }
    }
}
