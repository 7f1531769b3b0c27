//! Files and folders that appear completely or not at all.
//!
//! Contents are written next to their final path under a temporary name, flushed to disk and
//! renamed. If the program is killed, the previous contents stay in place, perhaps with a
//! [leftover](remove_leftovers) under a temporary name.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};

/// Writes a file atomically, replacing an existing one, with the default mode for new files.
///
/// # Errors
///
/// The previous file stays unchanged, with one exception: if only the folder could not be flushed,
/// the new file is in place, but may not survive a power failure.
///
/// ```
/// use candle_grpo_base::atomic_file;
///
/// # fn main() -> std::io::Result<()> {
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("settings.json");
/// atomic_file::write(&path, b"{}")?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// # Ok(())
/// # }
/// ```
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |temporary| File::create(temporary)?.write_all(bytes))
}

/// Calls `write` with a temporary path, and moves the resulting file to `path`.
///
/// # Errors
///
/// Same as [`write`](write()).
pub fn write_with(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let temporary = beside(path, "tmp")?;
    let written = (|| {
        write(&temporary)?;
        // Windows can only flush a file that is open for writing.
        OpenOptions::new()
            .append(true)
            .open(&temporary)?
            .sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // Report the first error.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_parent(path)
}

/// Writes a folder atomically: `fill` fills a folder under a temporary name, which then replaces
/// the one at `path`.
///
/// `fill` must flush its files, as [`write`](write()) does. No system call swaps two folders on
/// every platform, so the previous folder is first renamed to `.NAME.PID.old` and removed
/// afterward. Whenever the program is killed, the folder at `path` is either complete, or absent
/// with the previous one kept under that name.
///
/// # Errors
///
/// The previous folder is moved back.
pub fn write_folder<E: From<Error>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let fresh = beside(path, "tmp")?;
    let written = (|| {
        remove(&fresh)?;
        fs::create_dir_all(&fresh)?;
        fill(&fresh)?;
        Ok(swap(&fresh, path)?)
    })();
    if written.is_err() {
        // Report the first error.
        let _ = remove(&fresh);
    }
    written
}

/// Removes the folder at `path` atomically: it is renamed before its contents are removed.
///
/// # Errors
///
/// If the folder does not exist or cannot be removed.
pub fn remove_folder(path: &Path) -> Result<()> {
    let old = beside(path, "old")?;
    remove(&old)?;
    fs::rename(path, &old)?;
    remove(&old)
}

/// Removes temporary files and folders from `folder` that a killed program left there, and no
/// others.
///
/// # Errors
///
/// If the folder cannot be read, or an entry cannot be removed.
pub fn remove_leftovers(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if is_leftover(&entry.file_name()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether `name` is a temporary name from this module, see [`leftover_of`].
pub fn is_leftover(name: &OsStr) -> bool {
    name.to_str().and_then(leftover_of).is_some()
}

/// Returns `NAME` from a temporary name: `.NAME.PID.tmp` or `.NAME.PID.old`.
pub fn leftover_of(name: &str) -> Option<&str> {
    let parts: Vec<&str> = name.rsplitn(3, '.').collect();
    let [extension, pid, hidden] = parts[..] else {
        return None;
    };
    let is_number = !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit());
    let is_leftover = matches!(extension, "tmp" | "old") && is_number;
    hidden.strip_prefix('.').filter(|_| is_leftover)
}

/// The path `.NAME.PID.extension` next to `path`.
fn beside(path: &Path, extension: &str) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("path: {}, must end in a file name", path.display()),
        ));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.{extension}", std::process::id()));
    Ok(path.with_file_name(hidden))
}

/// Renames the folder `fresh` to `path`. If that fails, moves the previous folder back.
fn swap(fresh: &Path, path: &Path) -> Result<()> {
    if !path.is_dir() {
        fs::rename(fresh, path)?;
        return sync_parent(path);
    }
    // A rename cannot replace a folder that is not empty, so move the old one aside first.
    let old = beside(path, "old")?;
    remove(&old)?;
    fs::rename(path, &old)?;
    if let Err(error) = fs::rename(fresh, path) {
        return Err(match fs::rename(&old, path) {
            Ok(()) => error,
            Err(_) => Error::new(
                error.kind(),
                format!("the previous directory is at {}: {error}", old.display()),
            ),
        });
    }
    sync_parent(path)?;
    remove(&old).map_err(|error| {
        let text = format!(
            "removing the previous directory at {}: {error}",
            old.display()
        );
        Error::new(error.kind(), text)
    })
}

fn remove(path: &Path) -> Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path)?;
    } else if path.exists() {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// Flushes the folder that contains `path`, so that a rename to `path` survives a power failure.
///
/// Does nothing on systems where folders cannot be opened and flushed.
fn sync_parent(path: &Path) -> Result<()> {
    if cfg!(unix) {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.map_or_else(|| PathBuf::from("."), Path::to_path_buf))?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_halfway_keeps_the_previous_file() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("state");
        write(&path, b"first")?;
        let halfway = write_with(&path, |temporary| {
            fs::write(temporary, "sec")?;
            Err(Error::other("no space"))
        });
        assert!(halfway.is_err());
        assert_eq!(fs::read(&path)?, b"first");
        assert_eq!(fs::read_dir(folder.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn a_folder_that_cannot_be_moved_in_leaves_the_old_one_in_place() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("checkpoint");
        fs::create_dir(&path)?;
        fs::write(path.join("first"), "first")?;
        // The old one can be moved aside, the new one does not exist.
        assert!(swap(&folder.path().join("lost"), &path).is_err());
        assert_eq!(fs::read(path.join("first"))?, b"first");
        assert_eq!(fs::read_dir(folder.path())?.count(), 1);
        Ok(())
    }
}
