//! The decoder and its parts.
//!
//! Each part has its forward and its backward pass in one file. Sampling with a cache takes the
//! same forward pass with another context.

mod attention;
mod block;
mod config;
mod decoder;
pub(crate) mod family;
mod frozen_linear;
pub(crate) mod input;
mod language_model;
pub(crate) mod linear;
mod mlp;
pub(crate) mod named_weight;
mod norm;
pub(crate) mod pass;
mod rope;
mod rope_scaling;
mod router;
mod value_head;

pub use config::DecoderConfig;
pub use decoder::Decoder;
pub use family::ModelType;
pub use language_model::{Backward, LanguageModel};
pub use rope_scaling::RopeScaling;
pub use router::{Router, RouterPass, Routing};
pub use value_head::ValueHead;
