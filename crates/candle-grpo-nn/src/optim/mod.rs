//! Gradients over micro-batches, and the optimizer.

mod adamw;
pub(crate) mod grad_sink;
mod gradients;
pub(crate) mod reduction;
mod sharding;

pub use adamw::{AdamW, AdamWConfig, DecayRule, MasterWeights, StateForm, StateMemory};
pub use gradients::{GradientDType, Gradients};
pub use reduction::BUCKET_BYTES;
pub use sharding::Sharding;
