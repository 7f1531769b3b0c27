//! The directories and the cgroup of one execution.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::cgroup::Cgroup;

/// Temporary directories and the cgroup of one execution. Drop it after the program has ended.
pub(crate) struct Place {
    folder: Option<TempDir>,
    root: PathBuf,
    files: PathBuf,
    cgroup: Option<Cgroup>,
}

impl Place {
    /// Creates the directories.
    pub(super) fn new(cgroup: Option<Cgroup>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("candle-grpo-").tempdir();
        let folder = folder.context("making a temporary directory")?;
        let (root, files) = (folder.path().join("root"), folder.path().join("files"));
        fs::create_dir(&root)?;
        fs::create_dir(&files)?;
        Ok(Self {
            folder: Some(folder),
            root,
            files,
            cgroup,
        })
    }

    /// Empty directory, where the new root is mounted.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Directory whose files the program receives. Without isolation, the program runs in it.
    pub(crate) fn files(&self) -> &Path {
        &self.files
    }

    pub(super) fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.cgroup = None;
        let Some(folder) = self.folder.take() else {
            return;
        };
        let path = folder.path().to_path_buf();
        if folder.close().is_err() {
            // A program without isolation may have removed its own permissions.
            let remove = "chmod -R u+rwx \"$0\"; rm -rf \"$0\"";
            let _ = Command::new("sh").args(["-c", remove]).arg(&path).output();
        }
    }
}
