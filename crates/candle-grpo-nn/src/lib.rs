//! Trainable decoder-only transformers, optimizer and gradient handling for candle-grpo.
//!
//! The decoders of candle-transformers are made for inference: their normalisation, rotary embedding and softmax
//! are fused operators without a backward pass, so that most weights receive no gradient and no error says so. The
//! [`Decoder`] here is composed of operators that differentiate, and [`Gradients::accumulate`] refuses a backward
//! pass that leaves any variable of [`Parameters`] without a gradient.
//!
//! One training step, from weights to weights:
//!
//! ```
//! use candle_core::{Device, Result, Tensor};
//! use candle_grpo_nn::{
//!     AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, ModelType, Parameters, RopeScaling,
//! };
//!
//! # fn main() -> Result<()> {
//! let device = Device::Cpu;
//! let config = DecoderConfig {
//!     model_type: ModelType::Llama,
//!     vocab_size: 11,
//!     hidden_size: 16,
//!     intermediate_size: 32,
//!     num_hidden_layers: 2,
//!     num_attention_heads: 4,
//!     num_key_value_heads: 2,
//!     head_dim: None,
//!     rms_norm_eps: 1e-6,
//!     rope_theta: 1e4,
//!     rope_scaling: RopeScaling::Default,
//!     no_rope_layers: vec![],
//!     max_position_embeddings: 32,
//!     tie_word_embeddings: true,
//! };
//! let parameters = Parameters::init(&config, 7, &device)?;
//! let decoder = Decoder::new(&config, parameters.var_builder())?;
//! let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
//!
//! let ids = Tensor::new(&[[1u32, 2, 3, 4]], &device)?;
//! let mask = Tensor::ones((1, 4), candle_core::DType::U32, &device)?;
//! let hidden = decoder.padded_hidden_states(&ids, &mask)?;
//! let log_probs = candle_nn::ops::log_softmax(&decoder.logits(&hidden)?, 2)?;
//! let loss = log_probs.mean_all()?.neg()?;
//!
//! let mut gradients = Gradients::new();
//! gradients.accumulate(&loss, &parameters)?;
//! drop((hidden, log_probs, loss)); // the graph ends before the variables change
//! gradients.clip_by_global_norm(1.0)?;
//! optimizer.step(&parameters, &gradients)?;
//! assert_eq!(optimizer.steps(), 1);
//! # Ok(())
//! # }
//! ```

pub mod adapters;
pub mod atomic_file;
pub mod decoding;
pub mod model;
pub mod optim;
pub mod packing;
pub mod weights;

pub use adapters::{Lora, LoraConfig};
pub use decoding::{PagedCache, SequenceId};
pub use model::{
    Backward, Decoder, DecoderConfig, LanguageModel, ModelType, RopeScaling, Router, RouterPass,
    Routing, ValueHead,
};
pub use optim::{AdamW, AdamWConfig, DecayRule, Gradients};
pub use packing::PackedTokens;
pub use weights::{ComputeCopies, Gguf, GgufValue, Parameters};
