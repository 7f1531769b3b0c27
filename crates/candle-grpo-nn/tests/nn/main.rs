//! Tests of the crate, one module per subject.

mod adamw;
mod atomic_file;
mod base_weights;
mod biases;
mod checkpoint_form;
mod config_defaults;
mod cuda_budget;
mod cuda_training_budget;
mod decoder;
mod decoding;
mod export;
mod gguf;
mod golden;
mod gradients;
mod instructions;
mod lora;
mod parameters;
mod recorded;
mod router;
mod routing;
mod safetensors;
mod sequence_classifier;
mod shared_prefixes;
mod small;
mod smollm3;
mod value_head;
