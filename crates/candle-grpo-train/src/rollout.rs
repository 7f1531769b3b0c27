//! What the policy answered.

use serde::{Deserialize, Serialize};

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The policy drew a stop token.
    Stop,
    /// The completion has the greatest length allowed.
    Length,
}

/// One completion of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    /// [`crate::Prompt::index`] of its prompt.
    pub prompt_index: u64,
    /// Which of the completions of the prompt it is; it goes on counting where a prompt occurs again in a step.
    pub sample_index: usize,
    /// The tokens of the prompt.
    pub prompt_tokens: Vec<u32>,
    /// The tokens drawn, the stop token included.
    pub completion_tokens: Vec<u32>,
    /// The log-probability of each token drawn, under the distribution it was drawn from (temperature applied).
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}
