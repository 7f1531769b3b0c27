//! Weights by name: initialization, safetensors files, Hugging Face folders and GGUF files.

pub(crate) mod base_weights;
pub(crate) mod check;
mod checkpoint_form;
pub(crate) mod compute_copies;
pub(crate) mod divided_weights;
mod export;
pub(crate) mod gguf;
mod hugging_face;
mod masters;
pub(crate) mod parameters;
mod safetensors;
pub(crate) mod safetensors_writer;
mod sequence_classifier;
pub(crate) mod shard;
pub(crate) mod stacks;
pub(crate) mod standard_normal;
pub(crate) mod stored_tensor;

pub use base_weights::BaseWeights;
pub use check::{all_finite, text_model};
pub use checkpoint_form::CheckpointForm;
pub use compute_copies::ComputeCopies;
pub use divided_weights::Held;
pub use export::Export;
pub use gguf::{Gguf, GgufDType, GgufValue};
pub use masters::WeightDivision;
pub use parameters::Parameters;
pub use safetensors::tensor_places;
