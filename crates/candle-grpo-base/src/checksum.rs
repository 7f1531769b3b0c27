//! Checksums as text.

/// Returns bytes as hexadecimal digits, like sha256sum.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
