//! The decoder and its parts.
//!
//! A family describes its decoders as an arrangement of parts. Each part has its forward and its
//! backward pass in one file. Sampling with a cache takes the same forward pass with another
//! context.

pub(crate) mod architecture;
mod attention;
mod block;
pub(crate) mod config;
mod decoder;
mod experts;
pub(crate) mod families;
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
pub(crate) mod rope_scaling;
pub(crate) mod router;
pub(crate) mod routes;
pub(crate) mod sequence_classifier;
mod value_head;

pub use config::{DecoderConfig, LayerType};
pub use decoder::Decoder;
pub use families::ModelType;
pub use language_model::{Backward, LanguageModel};
pub use model_config::ModelConfig;
pub use rope_scaling::RopeScaling;
pub use router::{Router, RouterPass, Routing};
pub use routes::ExpertBalance;
pub use sequence_classifier::{SequenceClassifier, SequenceClassifierConfig};
pub use value_head::ValueHead;
