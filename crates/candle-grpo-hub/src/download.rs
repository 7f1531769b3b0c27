//! Downloads files.

use std::fs;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;

use anyhow::{Context, Error, Result, anyhow};
use sha2::{Digest, Sha256};
use ureq::http::header::CONTENT_RANGE;

use super::TransferError;
use super::cache::Part;
use super::client::{Answer, Client, Failure, Method, TRIES};
use candle_grpo_base::checksum::hex;

const BUFFER: usize = 1 << 18;

/// A file on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remote {
    /// Path in the repository.
    pub(super) file: String,
    pub(super) url: String,
    /// Identifies the contents: the SHA-256 for a file in large file storage, otherwise its git
    /// hash.
    pub(super) etag: String,
    /// The size in bytes.
    pub(super) size: Option<u64>,
}

impl Remote {
    /// Returns whether `blob` has these contents, as far as its size shows.
    pub(super) fn is_at(&self, blob: &Path) -> bool {
        let Ok(metadata) = fs::metadata(blob) else {
            return false;
        };
        metadata.is_file() && self.size.is_none_or(|size| size == metadata.len())
    }

    /// Downloads the file to `blob`, which appears when it is complete. An interrupted transfer is
    /// resumed.
    pub(super) fn download(&self, client: &Client, blob: &Path) -> Result<(), Failure> {
        let mut download = Download {
            remote: self,
            client,
            part: Part::create(blob).map_err(|error| self.disk_failure(&error, blob))?,
            hash: Sha256::new(),
            length: 0,
            reported: 0,
        };
        let mut failed = 0;
        loop {
            let before = download.reported;
            let failure = match download.fill(blob) {
                Ok(()) => break,
                Err(failure) => failure,
            };
            if download.reported > before {
                failed = 0;
            }
            failed += 1;
            client.pause(failure, failed, TRIES)?;
        }
        download.check()?;
        let part = download.part;
        part.finish()
            .map_err(|error| self.disk_failure(&error, blob))
    }

    /// The failure when the cache cannot be written.
    fn disk_failure(&self, error: &io::Error, blob: &Path) -> Failure {
        let folder = blob.parent().unwrap_or(blob).display();
        let size = match self.size {
            Some(size) => format!(" ({size} bytes)"),
            None => String::new(),
        };
        let hint = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                "; free some space, or set HF_HUB_CACHE to a directory on another disk"
            }
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                "; set HF_HUB_CACHE to a directory that is writable"
            }
            _ => "",
        };
        let message = format!("writing {}{size} to {folder}: {error}{hint}", self.file);
        Failure::Other(Error::new(TransferError(message)))
    }
}

struct Download<'a> {
    remote: &'a Remote,
    client: &'a Client<'a>,
    part: Part,
    hash: Sha256,
    /// Number of bytes in the partial file.
    length: u64,
    /// Number of bytes already reported as progress.
    reported: u64,
}

impl Download<'_> {
    /// Fills the partial file up to the end.
    fn fill(&mut self, blob: &Path) -> Result<(), Failure> {
        let start = self.length;
        let sent = self.client.send(Method::Get, &self.remote.url, start);
        let answer = match sent {
            // The server has different or fewer contents.
            Err(Failure::Refused(refusal)) if start > 0 && refusal.status == 416 => {
                self.restart(blob)?;
                return Err(Failure::transient(format!(
                    "{}: has no byte {start}",
                    self.remote.url
                )));
            }
            sent => sent?,
        };
        let is_same = answer
            .etag
            .as_ref()
            .is_none_or(|etag| *etag == self.remote.etag);
        if start > 0 && !(is_same && answer.etag.is_some() && continues(&answer, start)) {
            self.restart(blob)?;
            // A response with the whole file can be used directly.
            if answer.response.status() != 200 || !is_same {
                return Err(Failure::transient(format!(
                    "{}: does not continue at byte {start}",
                    self.remote.url
                )));
            }
        }
        if !is_same {
            return Err(self.wrong(format!(
                "etag {}, must be {}",
                answer.etag.unwrap_or_default(),
                self.remote.etag
            )));
        }
        self.read(answer, blob)
    }

    fn read(&mut self, answer: Answer, blob: &Path) -> Result<(), Failure> {
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        let broken = |error: String, length| {
            let file = &self.remote.url;
            Failure::transient(format!(
                "{file}: the transfer was interrupted after {length} bytes: {error}"
            ))
        };
        loop {
            self.client.ensure_not_canceled()?;
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error.to_string(), self.length)),
            };
            let bytes = &buffer[..read];
            let length = self.length + read as u64;
            if let Some(size) = self.remote.size.filter(|&size| length > size) {
                return Err(self.wrong(format!("at least {length} bytes, must be {size}")));
            }
            let limit = self.client.hub.unsized_limit;
            if self.remote.size.is_none() && length > limit {
                return Err(self.wrong(format!(
                    "more than {limit} bytes for a file whose size it does not report"
                )));
            }
            let written = self.part.file.write_all(bytes);
            written.map_err(|error| self.remote.disk_failure(&error, blob))?;
            self.hash.update(bytes);
            self.length = length;
            let new = length.saturating_sub(self.reported);
            self.client.progress.advance(new as usize, 0);
            self.reported += new;
        }
        match self.remote.size {
            Some(size) if size != self.length => {
                Err(broken(format!("the file has {size}"), self.length))
            }
            _ => Ok(()),
        }
    }

    /// Empties the partial file.
    fn restart(&mut self, blob: &Path) -> Result<(), Failure> {
        let emptied = self
            .part
            .file
            .set_len(0)
            .and_then(|()| self.part.file.rewind());
        emptied.map_err(|error| self.remote.disk_failure(&error, blob))?;
        self.hash = Sha256::new();
        self.length = 0;
        Ok(())
    }

    /// Compares the hash of a file in large file storage.
    fn check(&mut self) -> Result<(), Failure> {
        let etag = &self.remote.etag;
        let is_sha256 = etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let found = hex(&self.hash.finalize_reset());
        if is_sha256 && found != etag.to_ascii_lowercase() {
            return Err(self.wrong(format!("SHA-256 {found}, must be {etag}")));
        }
        Ok(())
    }

    fn wrong(&self, what: String) -> Failure {
        let message = format!(
            "{}: the server sent different contents: {what}",
            self.remote.url
        );
        Failure::Other(Error::new(TransferError(message)))
    }
}

/// Returns whether a response has the bytes from `start` on.
fn continues(answer: &Answer, start: u64) -> bool {
    let range = answer.response.headers().get(CONTENT_RANGE);
    let range = range
        .and_then(|range| range.to_str().ok())
        .unwrap_or_default();
    answer.response.status() == 206 && range.starts_with(&format!("bytes {start}-"))
}

/// Describes a file from response headers.
pub(super) fn describe(
    client: &Client,
    url: String,
    file: &str,
    commit: &str,
) -> Result<Remote, Failure> {
    let answer = client.with_retries(TRIES, || client.send(Method::Head, &url, 0))?;
    let remote = || -> Result<Remote> {
        let etag = answer
            .etag
            .context("the server sends no ETag; HF_ENDPOINT must be a hub's URL")?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_valid = !etag.is_empty() && etag.chars().all(is_name) && !etag.starts_with('.');
        if !is_valid {
            return Err(anyhow!("the ETag {etag:?}, must be a hash"));
        }
        if let Some(other) = answer.commit.filter(|other| other != commit) {
            return Err(anyhow!("the server sent commit {other}, must be {commit}"));
        }
        Ok(Remote {
            file: file.to_owned(),
            url: url.clone(),
            etag,
            size: answer.size,
        })
    };
    remote()
        .with_context(|| url.clone())
        .map_err(Failure::Other)
}
