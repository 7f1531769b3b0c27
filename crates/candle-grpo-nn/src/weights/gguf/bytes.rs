//! Reads little-endian numbers and strings, checking how many bytes are left.

use std::io::Read;

use candle_core::{Result, bail};

/// Maximum header length. A vocabulary with 250,000 tokens and its merges takes about 12 MiB.
const LONGEST_HEADER: u64 = 64 << 20;

pub(super) struct Bytes<R> {
    reader: R,
    /// File length, at most [`LONGEST_HEADER`].
    end: u64,
    position: u64,
}

impl<R: Read> Bytes<R> {
    pub(super) fn new(reader: R, file_length: u64) -> Self {
        Self {
            reader,
            end: file_length.min(LONGEST_HEADER),
            position: 0,
        }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Checks that `count` items with at least `size` bytes each can follow.
    pub(super) fn ensure_left(&self, what: &str, count: u64, size: u64) -> Result<()> {
        let left = self.end - self.position;
        let needed = count.checked_mul(size);
        if needed.is_none_or(|needed| needed > left) {
            let limit = if self.end == LONGEST_HEADER {
                " of the maximum header length, 64 MiB,"
            } else {
                ""
            };
            bail!(
                "{what} at byte {}: {count} of at least {size} bytes each, only {left} bytes{limit} are left",
                self.position
            );
        }
        Ok(())
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.ensure_left("header", 1, N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        self.position += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn string(&mut self) -> Result<String> {
        let length = self.u64()?;
        self.ensure_left("string", length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes)?;
        self.position += length;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
