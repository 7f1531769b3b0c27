//! The decoder and its parts. Each part has its forward and its backward pass in one file.

pub(crate) mod attention;
pub(crate) mod attention_mask;
pub(crate) mod block;
mod config;
mod decoder;
pub(crate) mod frozen_linear;
pub(crate) mod language_model;
pub(crate) mod linear;
pub(crate) mod mlp;
pub(crate) mod named_weight;
pub(crate) mod norm;
pub(crate) mod rope;
mod rope_scaling;
mod router;
mod value_head;

pub use config::{DecoderConfig, ModelType};
pub use decoder::Decoder;
pub use language_model::{Backward, LanguageModel};
pub use rope_scaling::RopeScaling;
pub use router::{Router, RouterPass, Routing};
pub use value_head::ValueHead;
