//! Low-rank adapters (LoRA) and their files in PEFT's format.

mod lora;
pub(crate) mod peft;

pub(crate) use lora::linear_maps;
pub use lora::{Lora, LoraConfig};
