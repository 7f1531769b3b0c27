//! Completions and their sources.
//!
//! [`LocalGenerator`] samples in this process and needs no setup. [`engine`] samples from vLLM,
//! SGLang or llama.cpp servers. Choose a server if sampling takes most of a step. To sample from
//! another source, implement [`Generator`].

mod adapter_engine;
mod completion;
mod completion_builder;
mod config;
pub(crate) mod decode;
#[cfg(feature = "engines")]
pub mod engine;
mod engine_kind;
pub(crate) mod episode;
mod generator;
mod local;
pub(crate) mod sampling_config;
mod stop_strings;
mod structured_outputs;
mod trajectories;
mod unfinished;

pub use adapter_engine::AdapterEngine;
pub use candle_grpo_rewards::FinishReason;
pub use completion::{Completion, Rollout, Row};
pub use completion_builder::CompletionBuilder;
pub use config::{RolloutConfig, WeightSync};
pub use decode::answer_text;
pub use engine_kind::Engine;
pub use generator::{
    CompletionSeed, DecodeText, Deliver, GenerationBatch, Generator, Partial, PolicyWeights,
    PromptRequest,
};
pub use local::LocalGenerator;
pub(crate) use local::{STEPS_BEFORE_PACKING, prefill_tokens};
pub use sampling_config::SamplingConfig;
pub use structured_outputs::StructuredOutputs;
pub use trajectories::{DrawTurns, Play, Trajectories};
pub use unfinished::{CompletionState, UnfinishedCompletion, UnfinishedGroup};
