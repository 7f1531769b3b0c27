//! Token-by-token sampling: next-token logits and the key-value cache.

mod next_logits;
mod packed_weights;
mod paged_cache;
#[cfg(feature = "cuda")]
mod recorded_steps;
mod sequences;

pub(crate) use packed_weights::PackedWeights;
pub(crate) use paged_cache::pages_for;
pub use paged_cache::{PagedCache, SequenceId};
pub use sequences::{Decoding, SequenceStates};
pub(crate) use sequences::{PagedDecoding, full_pass};
