//! Completions from inference servers: vLLM, SGLang, and servers with OpenAI's API.
//!
//! [`ServerGenerator`] is the [`Generator`](crate::Generator). It distributes completions over
//! servers, retries failed requests, and sends the policy's weights after each update.
//! [`ServerTeacher`] requests log-probs for given tokens. To support another kind of server,
//! implement [`Protocol`], which defines its requests and answers.
//!
//! Tokens are exchanged as ids; no text is tokenized again. At the start, a probe determines which
//! distribution the server's log-probs belong to.

mod adapters;
mod draw;
mod generator;
mod ipc_handles;
mod live_weights;
mod openai;
mod packing;
mod probe;
mod prober;
mod protocol;
mod servers;
mod sglang;
mod sleep;
mod teacher;
mod transfer;
mod vllm;
mod vllm_ipc;
mod vllm_nccl;
mod vllm_transfer;
mod weight_check;
mod weights;

pub use adapters::ServerAdapters;
pub use generator::ServerGenerator;
pub use openai::OpenAi;
pub use protocol::{
    Call, Checksums, DrawRequest, Drawn, End, Failure, Part, Protocol, ScoreRequest, Scored,
    ServedModel, Server,
};
pub use sglang::Sglang;
pub use teacher::ServerTeacher;
pub use vllm::Vllm;
pub use weights::{EngineWeights, WeightFormat};
