//! Weights by name: initialization, safetensors files, Hugging Face folders and GGUF files.

pub(crate) mod compute_copies;
pub(crate) mod finite;
mod gguf;
mod hugging_face;
pub(crate) mod normal;
pub(crate) mod parameters;
pub(crate) mod redundant;
pub(crate) mod safetensors;

pub use compute_copies::ComputeCopies;
pub use gguf::{Gguf, GgufValue};
pub use parameters::Parameters;
