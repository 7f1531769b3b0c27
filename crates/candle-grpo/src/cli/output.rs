//! Files that a command writes where the user asks.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use candle_grpo::nn::atomic_file;

use super::exit::Exit;

/// Returns an error unless `path` is free, `force` is set, or the file's first line shows that this
/// command wrote it. A file in `inputs` is never replaced, and one in an `inputs` directory only if
/// this command wrote it.
pub(super) fn check(
    path: &Path,
    force: bool,
    inputs: &[PathBuf],
    is_own: impl FnOnce(&str) -> bool,
) -> Result<(), Exit> {
    let refuse = |reason: &str| Err(Exit::Config(format!("{}: {reason}", path.display())));
    if path.is_dir() {
        return refuse("is a directory, must be the path of a file");
    }
    if path.exists() && !path.is_file() {
        return refuse("is not a regular file, must be the path of a file");
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return refuse(&error.to_string()),
    };
    let mut line = String::new();
    let is_read = BufReader::new(file).read_line(&mut line).is_ok();
    let own = is_read && is_own(&line);
    let place = resolved(path)?;
    for input in inputs {
        if place.starts_with(resolved(input)?) && !(own && input.is_dir()) {
            return refuse(&format!(
                "exists already and belongs to the input {}; choose another file",
                input.display()
            ));
        }
    }
    // Nothing is lost with an empty file.
    if own || force || is_read && line.is_empty() {
        return Ok(());
    }
    refuse(
        "exists already and was not written by this command; choose another file or pass --force",
    )
}

/// Returns `path` without links and dots. The last components need not exist.
pub(super) fn resolved(path: &Path) -> Result<PathBuf, Exit> {
    let absolute = std::path::absolute(path)?;
    let mut existing = absolute.as_path();
    let mut rest = Vec::new();
    loop {
        if let Ok(mut resolved) = existing.canonicalize() {
            resolved.extend(rest.iter().rev());
            return Ok(resolved);
        }
        match (existing.parent(), existing.file_name()) {
            (Some(parent), Some(name)) => {
                rest.push(name);
                existing = parent;
            }
            _ => return Ok(absolute),
        }
    }
}

/// Writes `bytes` to the file at `path` atomically.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Exit> {
    atomic_file::write(path, bytes)
        .map_err(|error| Exit::Run(format!("writing {}: {error}", path.display())))
}
