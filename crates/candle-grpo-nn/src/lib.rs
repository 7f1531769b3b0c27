//! Trainable decoder-only transformers for Candle, from the families in [`ModelType`].
//!
//! The decoders in candle-transformers are made for inference. Their normalization, rotary
//! embedding and softmax are fused operators without a backward pass, so most weights silently
//! receive no gradient. Here every [`Decoder`] operator is differentiable, and
//! [`Gradients::accumulate`] fails if a variable receives no gradient.
//!
//! | module | contents |
//! | --- | --- |
//! | [`model`] | the decoder and its parts; [`LanguageModel`] and [`ModelConfig`] for custom models |
//! | [`decoding`] | sampling with a paged key-value cache |
//! | [`packing`] | batches without padding, with shared prefixes |
//! | [`weights`] | parameters, Hugging Face folders, GGUF files |
//! | [`adapters`] | LoRA, and PEFT files |
//! | [`optim`] | gradients over micro-batches, AdamW |
//! | [`atomic_file`] | files and folders that appear completely or not at all |
//! | [`json`] | plain messages about JSON |
//!
//! # Example
//!
//! One training step:
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_grpo_nn::{AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, Parameters};
//!
//! # fn main() -> Result<()> {
//! let device = Device::Cpu;
//! let config = DecoderConfig {
//!     vocab_size: 11,
//!     hidden_size: 16,
//!     intermediate_size: 32,
//!     num_hidden_layers: 2,
//!     num_attention_heads: 4,
//!     num_key_value_heads: 2,
//!     max_position_embeddings: 32,
//!     tie_word_embeddings: true,
//!     ..DecoderConfig::default()
//! };
//! let parameters = Parameters::init(&config, 7, &device)?;
//! let decoder = Decoder::new(&config, parameters.var_builder())?;
//! let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
//!
//! let ids = Tensor::new(&[[1u32, 2, 3, 4]], &device)?;
//! let mask = Tensor::ones((1, 4), DType::U32, &device)?;
//! let hidden = decoder.padded_hidden_states(&ids, &mask)?;
//! let log_probs = candle_nn::ops::log_softmax(&decoder.logits(&hidden)?, 2)?;
//! let loss = log_probs.mean_all()?.neg()?;
//!
//! let mut gradients = Gradients::new();
//! gradients.accumulate(&loss, &parameters)?;
//! drop((hidden, log_probs, loss)); // drops the graph before the variables change
//! gradients.clip_by_global_norm(1.0)?;
//! optimizer.step(&parameters, &gradients)?;
//! assert_eq!(optimizer.steps(), 1);
//! # Ok(())
//! # }
//! ```

pub mod adapters;
mod compute_dtype;
mod config;
pub mod decoding;
pub mod model;
pub mod optim;
pub mod packing;
mod router;
pub mod weights;

pub use candle_grpo_base::{atomic_file, json};

pub use adapters::{Lora, LoraConfig, MergedCopies};
pub use compute_dtype::ComputeDType;
pub use config::{DecoderConfig, LayerType, ModelType, RopeScaling, SequenceClassifierConfig};
pub use decoding::{Decoding, PagedCache, SequenceId, SequenceStates};
pub use model::{
    ActivationCheckpointing, Backward, Decoder, DividedModel, LanguageModel, ModelConfig,
    SequenceClassifier, ValueHead,
};
pub use optim::{AdamW, AdamWConfig, Gradients};
pub use packing::{PackedTokens, SequenceRanks};
pub use weights::{
    BaseWeights, CheckpointForm, ComputeCopies, Export, Gguf, GgufDType, GgufValue, Held,
    Parameters, WeightDivision, all_finite, tensor_places,
};

// Compiles the README example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
