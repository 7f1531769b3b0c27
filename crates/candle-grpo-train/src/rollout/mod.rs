//! Completions of prompts and how they are drawn.

mod categorical;
mod completion;
pub(crate) mod decode;
mod logit_filters;
pub(crate) mod sampler;
mod stop_strings;

pub use completion::{FinishReason, Rollout};
pub use sampler::{Sampler, SamplingConfig};
