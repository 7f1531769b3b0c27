//! Groups of completions that are sampled over several steps.

use serde::{Deserialize, Serialize};

use super::{Completion, CompletionSeed, Rollout};
use crate::Prompt;

/// A group of completions for one prompt, some of which may not have ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnfinishedGroup {
    /// Index of the prompt.
    pub row: usize,
    /// The step that started the group.
    pub step: usize,
    /// The completions.
    pub completions: Vec<UnfinishedCompletion>,
}

/// A completion that may not have ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnfinishedCompletion {
    /// Its identity, which determines its random numbers.
    pub seed: CompletionSeed,
    /// Its tokens so far.
    pub state: CompletionState,
}

/// A completion's tokens so far.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompletionState {
    /// None.
    #[default]
    New,
    /// At least one, and more will follow.
    Begun(Completion),
    /// All.
    Ended(Completion),
}

impl UnfinishedGroup {
    /// Starts a group without tokens.
    pub(crate) fn new(row: usize, step: usize, seeds: &[CompletionSeed]) -> Self {
        let completion = |&seed: &CompletionSeed| UnfinishedCompletion {
            seed,
            state: CompletionState::New,
        };
        Self {
            row,
            step,
            completions: seeds.iter().map(completion).collect(),
        }
    }

    /// Returns the number of completions that have not ended.
    pub fn count_left(&self) -> usize {
        let completions = self.completions.iter();
        completions
            .filter(|completion| !completion.has_ended())
            .count()
    }

    /// Returns the rollouts of the completions that have ended, with the prompt of the group.
    pub(crate) fn into_rollouts(self, prompt: &Prompt) -> impl Iterator<Item = Rollout> {
        self.completions
            .into_iter()
            .filter_map(|completion| match completion.state {
                CompletionState::Ended(ended) => {
                    Some(Rollout::single(completion.seed, prompt, ended))
                }
                CompletionState::New | CompletionState::Begun(_) => None,
            })
    }
}

impl UnfinishedCompletion {
    /// Returns true if it has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, CompletionState::Ended(_))
    }
}
