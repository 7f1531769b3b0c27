//! Files that appear whole or not at all.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};

use candle_core::Tensor;

/// Writes a file that appears whole or not at all, with the mode that any new file gets.
///
/// It is written beside its place under another name, flushed to the disk and then renamed, which replaces what was
/// there; after an error that stays as it was. If the error is about flushing the folder, the file is in place, but may
/// not outlast a loss of power.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("settings.json");
/// candle_grpo_nn::write_whole(&path, b"{}")?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// # Ok(())
/// # }
/// ```
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |temporary| File::create(temporary)?.write_all(bytes))
}

/// What `write` writes to the path that it is given appears at `path`.
fn write_with(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let Some(name) = path.file_name() else {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "the path does not end in a file name",
        ));
    };
    let mut temporary_name = OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary_name);
    let written = (|| {
        write(&temporary)?;
        // Windows flushes only what is open for writing.
        OpenOptions::new()
            .append(true)
            .open(&temporary)?
            .sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // The first error is the one worth telling.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_parent(path)
}

/// [`write_whole`] in the safetensors format.
pub(crate) fn write_safetensors(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Tensor)>,
    metadata: Option<HashMap<String, String>>,
) -> candle_core::Result<()> {
    // Tensor by tensor: a copy of all of them in memory would be as large as the file.
    let write = |temporary: &Path| {
        // The library makes files that only their owner reads.
        let mode = File::create(temporary)?.metadata()?.permissions();
        let written = safetensors::serialize_to_file(tensors, metadata, temporary);
        written.map_err(|error| match error {
            safetensors::SafeTensorError::IoError(error) => error,
            error => Error::other(error),
        })?;
        fs::set_permissions(temporary, mode)
    };
    write_with(path, write).map_err(candle_core::Error::wrap)
}

/// Flushes the folder that `path` lies in, so that a rename to `path` outlasts a loss of power.
///
/// Does nothing on systems on which folders cannot be opened and flushed.
pub fn sync_parent(path: &Path) -> Result<()> {
    if cfg!(unix) {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.map_or_else(|| PathBuf::from("."), Path::to_path_buf))?.sync_all()?;
    }
    Ok(())
}
