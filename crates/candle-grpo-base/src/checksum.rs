//! Checksums as text.

/// Returns bytes as hexadecimal digits, as sha256sum prints them.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
