//! What the policy answered.

use serde::{Deserialize, Serialize};

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The policy drew a stop token.
    StopToken,
    /// The text of the completion has a stop string.
    StopString,
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
    /// The tokens drawn, a stop token and those of a stop string included. All of them count; [`TokenBatch`](crate::TokenBatch)
    /// pads them and has the mask.
    pub completion_tokens: Vec<u32>,
    /// The log-probability of each token under the policy at the temperature of sampling, `softmax(logits / temperature)` over
    /// all tokens: what [`Actor::log_probs`](crate::Actor::log_probs) computes, and what training compares with.
    pub log_probs: Vec<f32>,
    /// The log-probability of each token under the distribution that it was drawn from: that of `log_probs`, renormalised over
    /// the tokens that top-k, top-p and min-p left. The same as `log_probs` where these are off, and 0 where the likeliest token
    /// was taken.
    pub drawn_log_probs: Vec<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}
