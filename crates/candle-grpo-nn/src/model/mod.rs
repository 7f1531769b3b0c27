//! The decoder and its parts.
//!
//! A family assembles its decoders from these parts. Each part has its forward and backward pass in
//! one file. Sampling with a cache uses the same forward pass with a different context.

mod activation_checkpointing;
pub(crate) mod adapter_rows;
mod attention;
mod block;
mod decoder;
mod divided_model;
mod experts;
mod frozen_linear;
mod gated_delta;
pub(crate) mod input;
mod language_model;
pub(crate) mod linear;
mod memory;
mod mlp;
mod model_config;
pub(crate) mod named_weight;
mod norm;
pub(crate) mod pass;
mod rope;
pub(crate) mod routes;
pub(crate) mod sequence_classifier;
mod value_head;

pub use crate::config::{
    DecoderConfig, LayerType, ModelType, RopeScaling, SequenceClassifierConfig,
};
pub use crate::router::{Router, RouterPass, Routing};
pub use activation_checkpointing::ActivationCheckpointing;
pub use decoder::Decoder;
pub use divided_model::DividedModel;
pub use language_model::{Backward, LanguageModel};
pub use memory::{MergedBytes, RecordedBytes};
pub use model_config::ModelConfig;
pub use routes::ExpertBalance;
pub use sequence_classifier::SequenceClassifier;
pub use value_head::ValueHead;
