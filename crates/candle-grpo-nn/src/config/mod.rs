//! Decoder description: configuration, family, architecture and weight names, in models and in
//! files. Models and file readers build on it.

pub(crate) mod architecture;
pub(crate) mod decoder_config;
pub(crate) mod families;
pub(crate) mod gguf_key;
pub(crate) mod rope_scaling;
mod sequence_classifier_config;
pub(crate) mod stack;

pub use decoder_config::{DecoderConfig, LayerType};
pub use families::ModelType;
pub use rope_scaling::RopeScaling;
pub use sequence_classifier_config::SequenceClassifierConfig;

pub(crate) use sequence_classifier_config::SCORE;
