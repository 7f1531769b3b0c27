//! Completions from inference servers: vLLM, SGLang, and servers with the API of OpenAI.
//!
//! [`ServerGenerator`] is the [`Generator`](crate::Generator): it shares out completions among
//! servers, repeats what has failed, and sends the weights of the policy after each update.
//! [`ServerTeacher`] asks for the log-probs of given tokens. A [`Protocol`] has the requests and
//! answers of one kind of server.
//!
//! Tokens go in and out as ids; no text is tokenized again. At the start, a probe determines the
//! distribution of the server's log-probs.

mod draw;
mod generator;
mod openai;
mod probe;
mod prober;
mod protocol;
mod servers;
mod sglang;
mod teacher;
mod vllm;
mod weights;

pub use generator::ServerGenerator;
pub use openai::OpenAi;
pub use protocol::{
    Call, DrawRequest, Drawn, End, Failure, Protocol, ScoreRequest, Scored, ServedModel, Server,
};
pub use sglang::Sglang;
pub use teacher::ServerTeacher;
pub use vllm::Vllm;
pub use weights::{EngineWeights, WeightFormat};
