//! Replies on disk.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use candle_grpo_base::atomic_file;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::answer::MAX_ANSWER;
use candle_grpo_base::checksum::hex;

/// Replies by their request's SHA-256 hash, one file each in `KE/KEY.json`.
pub(super) struct ReplyCache {
    folder: PathBuf,
    has_warned: AtomicBool,
}

/// A file's content.
#[derive(Serialize, Deserialize)]
struct Entry {
    reply: String,
    /// The reply's hash.
    sha256: String,
}

/// Threads in this process write one after the other, because temporary names have no thread
/// number.
static WRITING: Mutex<()> = Mutex::new(());

/// Returns a request's key.
pub(super) fn key(url: &str, body: &str) -> String {
    hex(&Sha256::digest(format!("{url}\n{body}")))
}

impl ReplyCache {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns the reply to a request, or `None` if there is none or its file is damaged.
    pub(super) fn read(&self, key: &str) -> Option<String> {
        let path = self.path(key);
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        // An entry holds its reply in quotes.
        let mut file = File::open(&path).ok()?.take(6 * MAX_ANSWER);
        file.read_to_end(&mut bytes).ok()?;
        let Entry { reply, sha256 } = serde_json::from_slice(&bytes).ok()?;
        (sum(&reply) == sha256).then_some(reply)
    }

    /// Writes the reply to a request. A failure is only a warning, because the reply was received.
    pub(super) fn write(&self, key: &str, reply: &str) {
        if let Err(error) = self.try_write(key, reply)
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("cache: a reply of the judge was not saved: {error:#}");
        }
    }

    fn try_write(&self, key: &str, reply: &str) -> Result<()> {
        let path = self.path(key);
        let entry = serde_json::to_vec(&Entry {
            reply: reply.to_owned(),
            sha256: sum(reply),
        })?;
        let _one = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = path.parent().context("a directory")?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        atomic_file::write(&path, &entry).with_context(|| path.display().to_string())
    }

    fn path(&self, key: &str) -> PathBuf {
        let first = key.get(..2).unwrap_or(key);
        self.folder.join(first).join(format!("{key}.json"))
    }
}

fn sum(reply: &str) -> String {
    hex(&Sha256::digest(reply))
}
