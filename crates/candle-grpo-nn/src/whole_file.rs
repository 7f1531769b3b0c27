//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};

/// Writes beside the place of the file under another name, flushes to the disk, then renames.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
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
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // The first error is the one worth telling.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_directory(path)
}

/// Makes the rename itself durable, where directories can be opened and flushed.
fn sync_directory(path: &Path) -> Result<()> {
    if cfg!(unix) {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.map_or_else(|| PathBuf::from("."), Path::to_path_buf))?.sync_all()?;
    }
    Ok(())
}
