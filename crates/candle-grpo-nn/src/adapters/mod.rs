//! Low-rank adapters (LoRA) and their files in PEFT's format.

mod lora;
mod merged_copies;
pub(crate) mod peft;

pub use lora::{Lora, LoraConfig};
pub use merged_copies::MergedCopies;
