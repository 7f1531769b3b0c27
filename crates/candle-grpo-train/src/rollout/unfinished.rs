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
    /// The tokens so far, at least one.
    pub begun: Option<Completion>,
    /// True if it has ended.
    pub has_ended: bool,
}

impl UnfinishedGroup {
    /// Starts a group without tokens.
    pub(crate) fn new(row: usize, step: usize, seeds: &[CompletionSeed]) -> Self {
        let completion = |&seed: &CompletionSeed| UnfinishedCompletion {
            seed,
            begun: None,
            has_ended: false,
        };
        Self {
            row,
            step,
            completions: seeds.iter().map(completion).collect(),
        }
    }

    /// Returns true if all completions have ended.
    pub fn is_whole(&self) -> bool {
        self.completions
            .iter()
            .all(|completion| completion.has_ended)
    }

    /// Returns the rollouts of a whole group, whose prompt is `prompt`.
    pub(crate) fn into_rollouts(self, prompt: &Prompt) -> impl Iterator<Item = Rollout> {
        self.completions.into_iter().filter_map(|completion| {
            Some(Rollout::single(completion.seed, prompt, completion.begun?))
        })
    }
}
