//! Batches without padding, and shared prefixes.

pub(crate) mod divided_rows;
mod packed_tokens;
pub(crate) mod shared_rows;

pub use divided_rows::SequenceRanks;
pub use packed_tokens::PackedTokens;
