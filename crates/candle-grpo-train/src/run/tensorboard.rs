//! TensorBoard event files.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// A TensorBoard event file with scalars.
///
/// Records are framed as in TFRecord files: length, masked CRC-32C of the length, data, masked
/// CRC-32C of the data. The data are protocol buffers with type `tensorflow.Event` and four fields.
///
/// ```
/// use candle_grpo_train::run::EventFile;
///
/// let folder = tempfile::tempdir()?;
/// let mut events = EventFile::create(folder.path())?;
/// events.write_scalars(1, [("reward_mean", 0.25), ("kl", 0.01)])?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file with a new name in the existing `folder`.
    pub fn create(folder: &Path) -> Result<Self> {
        let seconds = now().as_secs();
        // TensorBoard reads a folder's files in name order.
        let create = |number: u32| {
            let path = folder.join(format!(
                "events.out.tfevents.{seconds:010}.{number:03}.grpo"
            ));
            let file = OpenOptions::new().append(true).create_new(true).open(&path);
            (path, file)
        };
        let taken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AlreadyExists;
        let mut number = 0;
        let (path, file) = loop {
            match create(number) {
                (_, Err(error)) if taken(&error) => number += 1,
                done => break done,
            }
        };
        let file = file.with_context(|| format!("creating {}", path.display()))?;
        let mut events = Self { path, file };
        let mut event = event(0);
        bytes_field(&mut event, 3, b"brain.Event:2");
        events.write(&event)?;
        Ok(events)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a step's scalars.
    ///
    /// Names may contain slashes. Values may be NaN or infinite; TensorBoard marks them.
    pub fn write_scalars<'a>(
        &mut self,
        step: usize,
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        let mut summary = Vec::new();
        for (name, value) in scalars {
            let mut scalar = Vec::new();
            bytes_field(&mut scalar, 1, name.as_bytes());
            tag(&mut scalar, 2, FIXED_32);
            scalar.extend((value as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &scalar);
        }
        let mut event = event(step);
        bytes_field(&mut event, 5, &summary);
        self.write(&event)
    }

    /// Appends a record in one write, so that only the last record can be partial after a kill.
    fn write(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        self.file
            .write_all(&record)
            .with_context(|| format!("writing {}", self.path.display()))
    }
}

fn now() -> std::time::Duration {
    // A clock before 1970 is clamped to 1970.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const BYTES: u8 = 2;
const FIXED_32: u8 = 5;

/// Returns an event's first fields: wall time and step.
fn event(step: usize) -> Vec<u8> {
    let mut event = Vec::new();
    tag(&mut event, 1, FIXED_64);
    event.extend(now().as_secs_f64().to_le_bytes());
    tag(&mut event, 2, VARINT);
    varint(&mut event, step as u64);
    event
}

fn tag(message: &mut Vec<u8>, field: u8, kind: u8) {
    message.push(field << 3 | kind);
}

fn bytes_field(message: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    tag(message, field, BYTES);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn varint(message: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        message.push(x as u8 | 0x80);
        x >>= 7;
    }
    message.push(x as u8);
}

/// Returns TFRecord's masked checksum: rotated, plus a constant.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Computes CRC-32C (Castagnoli) bitwise, which is fast enough for short records.
fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in data {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let polynomial = if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            crc = crc >> 1 ^ polynomial;
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn checksums_have_the_published_values_of_crc32c() {
        // RFC 3720, B.4, and the check value of the polynomial.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    /// Parses records as a reader does.
    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut rest = bytes;
        let mut records = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked_crc(&rest[..8]).to_le_bytes());
            let data = &rest[12..12 + length];
            assert_eq!(
                rest[12 + length..16 + length],
                masked_crc(data).to_le_bytes()
            );
            records.push(data.to_vec());
            rest = &rest[16 + length..];
        }
        records
    }

    #[test]
    fn records_hold_step_names_and_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path()).unwrap();
        events.write_scalars(300, [("seconds/train", 1.5)]).unwrap();
        let records = records(&fs::read(events.path()).unwrap());
        assert_eq!(records.len(), 2);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // Field 2 is the step as a varint; field 5 contains field 1, which contains name and value.
        assert_eq!(records[1][9..12], [0x10, 0xac, 0x02]);
        let mut scalar = vec![0x0a, 13];
        scalar.extend(b"seconds/train");
        scalar.push(0x15);
        scalar.extend(1.5f32.to_le_bytes());
        let mut summary = vec![0x2a, scalar.len() as u8 + 2, 0x0a, scalar.len() as u8];
        summary.extend(scalar);
        assert_eq!(records[1][12..], summary);
    }

    #[test]
    fn a_second_file_has_a_name_of_its_own_behind_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let first = EventFile::create(folder.path()).unwrap();
        let second = EventFile::create(folder.path()).unwrap();
        assert!(first.path() < second.path());
    }
}
