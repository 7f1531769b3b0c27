//! A lock on a folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The locked file's name.
pub(crate) const LOCK: &str = ".lock";

/// Prevents other programs from using a folder, until dropped.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    file: File,
}

impl FolderLock {
    /// Locks the existing folder at `path`. Errors use `contents` to name what it holds.
    ///
    /// # Errors
    ///
    /// Fails if another program has it open.
    pub fn take(path: &Path, contents: &str) -> Result<Self> {
        let lock = path.join(LOCK);
        let file = OpenOptions::new().create(true).append(true).open(&lock);
        let file = file.with_context(|| format!("opening {}", lock.display()))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!(
                "{}: another program has the {contents} open",
                path.display()
            );
        }
        // Other errors come from file systems without locks.
        Ok(Self {
            path: path.to_path_buf(),
            file,
        })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // A program that another thread starts at this moment has the file as well until it runs,
        // so closing the file would not be enough.
        let _ = self.file.unlock();
    }
}
