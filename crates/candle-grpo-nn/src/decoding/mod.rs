//! Token-by-token sampling: next-token logits and the key-value cache.

mod next_logits;
mod packed_weights;
mod paged_cache;
#[cfg(feature = "cuda")]
mod recorded_steps;
mod sequences;

/// Recorded steps have fewer than this many rows more than sequences, so that fewer sizes occur.
pub(crate) const MORE_ROWS: usize = 16;

pub(crate) use packed_weights::PackedWeights;
pub use paged_cache::{PagedCache, SequenceId};
pub(crate) use paged_cache::{pages_for, pages_in_place, slots_in_place};
pub use sequences::{Decoding, SequenceStates};
pub(crate) use sequences::{PagedDecoding, full_pass};
