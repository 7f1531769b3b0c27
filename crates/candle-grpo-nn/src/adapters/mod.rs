//! Low-rank adapters (LoRA) and their files in PEFT's format.

mod lora;
pub(crate) mod peft;

pub use lora::{Lora, LoraConfig};
