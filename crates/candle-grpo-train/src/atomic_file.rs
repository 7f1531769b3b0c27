//! Files that are either as they were or complete.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};

/// Lets `write` fill a file or folder under a temporary name beside `path`, then renames it to `path`.
///
/// What was at `path` is replaced; if `write` fails it stays, and what was written is removed.
pub(crate) fn write_atomically(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let temporary = temporary_name(path)?;
    remove(&temporary)?;
    let result = write(&temporary)
        .and_then(|()| sync(&temporary))
        .and_then(|()| replace(&temporary, path));
    if result.is_err() {
        // The first error is the one to report.
        let _ = remove(&temporary);
    }
    result.with_context(|| format!("writing {}", path.display()))
}

/// [`write_atomically`] for contents at hand.
pub(crate) fn write_bytes_atomically(path: &Path, contents: &[u8]) -> Result<()> {
    write_atomically(path, |temporary| Ok(fs::write(temporary, contents)?))
}

fn temporary_name(path: &Path) -> Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| anyhow!("{}: has no file name", path.display()))?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    Ok(path.with_file_name(temporary))
}

fn sync(path: &Path) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            sync(&entry?.path())?;
        }
        return Ok(());
    }
    Ok(fs::File::open(path)?.sync_all()?)
}

fn replace(temporary: &Path, path: &Path) -> Result<()> {
    if !path.is_dir() {
        return Ok(fs::rename(temporary, path)?);
    }
    // A rename does not replace a folder with something in it: the old one is moved aside first.
    let old = temporary.with_extension("old");
    remove(&old)?;
    fs::rename(path, &old)?;
    fs::rename(temporary, path)?;
    remove(&old)
}

fn remove(path: &Path) -> Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path)?;
    } else if path.exists() {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_bytes_atomically(&path, b"old").unwrap();
        let error = write_atomically(&path, |temporary| {
            fs::write(temporary, "half of the n")?;
            bail!("disk full")
        })
        .unwrap_err();
        assert!(
            format!("{error:#}").ends_with("a.json: disk full"),
            "{error:#}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn folders_are_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        for name in ["first", "second"] {
            write_atomically(&path, |temporary| {
                fs::create_dir(temporary)?;
                Ok(fs::write(temporary.join(name), name)?)
            })
            .unwrap();
        }
        let names: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, ["second"]);
    }
}
