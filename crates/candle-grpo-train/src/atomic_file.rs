//! Folders that are replaced as a whole. Single files are written by [`candle_grpo_nn::write_whole`].

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candle_grpo_nn::sync_parent;

/// Lets `fill` fill a folder under a temporary name beside `path`, then renames it to `path`.
///
/// What `fill` writes it must flush, as [`candle_grpo_nn::write_whole`] does.
///
/// No system call swaps two folders everywhere, so a folder that was at `path` is renamed to `.NAME.PID.old` before, and
/// removed after. Whenever the program ends, the folder at `path` is complete, or there is none and the previous one is
/// kept beside it under that name. If an error comes, the previous one is renamed back.
pub(crate) fn write_folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let fresh = beside(path, "tmp")?;
    let result = remove(&fresh)
        .and_then(|()| Ok(fs::create_dir_all(&fresh)?))
        .and_then(|()| fill(&fresh))
        .and_then(|()| swap(&fresh, path));
    if result.is_err() {
        // The first error is the one to report.
        let _ = remove(&fresh);
    }
    result.with_context(|| format!("writing {}", path.display()))
}

fn beside(path: &Path, extension: &str) -> Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| anyhow!("{}: has no file name", path.display()))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.{extension}", std::process::id()));
    Ok(path.with_file_name(hidden))
}

/// Renames the folder `fresh` to `path`; what was there is as before if that fails.
fn swap(fresh: &Path, path: &Path) -> Result<()> {
    if !path.is_dir() {
        fs::rename(fresh, path)?;
        return Ok(sync_parent(path)?);
    }
    // A rename does not replace a folder with something in it: the old one is moved aside first.
    let old = beside(path, "old")?;
    remove(&old)?;
    fs::rename(path, &old)?;
    if let Err(error) = fs::rename(fresh, path) {
        return Err(match fs::rename(&old, path) {
            Ok(()) => error.into(),
            Err(_) => anyhow!(error).context(format!("the previous one is at {}", old.display())),
        });
    }
    sync_parent(path)?;
    remove(&old).with_context(|| format!("removing the previous one at {}", old.display()))
}

/// Removes the folder at `path` at once, as far as others see.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    let old = beside(path, "old")?;
    remove(&old)?;
    fs::rename(path, &old)?;
    remove(&old)
}

/// Removes from `folder` what writing of files and folders has left there when the program was ended in the midst of it, and
/// nothing else.
pub(crate) fn remove_leftovers(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if is_leftover(&entry.file_name()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether this is the name of something that was being written (`.NAME.PID.tmp`) or replaced (`.NAME.PID.old`).
pub(crate) fn is_leftover(name: &OsStr) -> bool {
    name.to_str().and_then(leftover_of).is_some()
}

/// Returns the `NAME` of a leftover `.NAME.PID.tmp` or `.NAME.PID.old`.
pub(crate) fn leftover_of(name: &str) -> Option<&str> {
    let parts: Vec<&str> = name.rsplitn(3, '.').collect();
    let [extension, pid, hidden] = parts[..] else {
        return None;
    };
    let is_number = !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit());
    let is_leftover = matches!(extension, "tmp" | "old") && is_number;
    hidden.strip_prefix('.').filter(|_| is_leftover)
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

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|e| e.unwrap().file_name()).collect()
    }

    fn write(path: &Path, name: &str) {
        write_folder(path, |fresh| Ok(fs::write(fresh.join(name), name)?)).unwrap();
    }

    #[test]
    fn folders_are_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        write(&path, "first");
        write(&path, "second");
        assert_eq!(names(&path), ["second"]);
        assert_eq!(names(folder.path()), ["checkpoint"]);
    }

    #[test]
    fn leftovers_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            ".a.7.tmp",
            ".a.b.12.old",
            ".config",
            "a.7.tmp",
            ".a.tmp",
            ".a.x.tmp",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::create_dir_all(folder.path().join(".c.3.tmp/full")).unwrap();
        remove_leftovers(folder.path()).unwrap();
        let mut left = names(folder.path());
        left.sort();
        assert_eq!(left, [".a.tmp", ".a.x.tmp", ".config", "a.7.tmp"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_folder_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        write(&path, "first");
        let error = write_folder(&path, |fresh| {
            fs::write(fresh.join("second"), "half of the s")?;
            bail!("disk full")
        })
        .unwrap_err();
        assert!(
            format!("{error:#}").ends_with("checkpoint: disk full"),
            "{error:#}"
        );
        assert_eq!(names(&path), ["first"]);
        assert_eq!(names(folder.path()), ["checkpoint"]);
    }

    #[test]
    fn a_folder_that_cannot_be_moved_in_leaves_the_old_one_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        write(&path, "first");
        // The old one can be moved aside, the new one is not there to be moved.
        assert!(swap(&folder.path().join("lost"), &path).is_err());
        assert_eq!(names(&path), ["first"]);
        assert_eq!(names(folder.path()), ["checkpoint"]);
    }
}
