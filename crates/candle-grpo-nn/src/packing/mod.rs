//! Batches without padding, and shared prefixes.

mod packed_tokens;
pub(crate) mod shared_rows;

pub use packed_tokens::PackedTokens;
