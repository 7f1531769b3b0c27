//! Episode keys.

use std::fmt;

use sha2::{Digest, Sha256};

/// A key, compared in constant time.
#[derive(Clone)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// Returns a key with 128 random bits.
    pub(crate) fn random() -> Self {
        Self(format!("grpo-{}", random_id()))
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Returns true if this is the key. It compares digests, which differ at positions that do not
    /// depend on where the keys differ.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        Sha256::digest(given) == Sha256::digest(self.0.as_bytes())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// 128 bits from the thread's secure generator, in hexadecimal digits.
pub(crate) fn random_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}
