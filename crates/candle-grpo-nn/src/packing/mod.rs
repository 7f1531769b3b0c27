//! Batches without padding, and prefixes that sequences share.

mod packed_tokens;
pub(crate) mod shared_rows;

pub use packed_tokens::PackedTokens;
