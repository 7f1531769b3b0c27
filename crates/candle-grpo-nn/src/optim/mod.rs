//! Gradients over micro-batches, and the optimizer.

mod adamw;
pub(crate) mod grad_sink;
mod gradients;
mod reduction;
mod shard;

pub use adamw::{AdamW, AdamWConfig, DecayRule, MasterWeights, StateForm};
pub use gradients::Gradients;
