//! Files that a command writes where the user says.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;

use candle_grpo::nn::atomic_file;

use super::exit::Exit;

/// Returns an error unless `path` is free, `force` is given, or the first line of the file there is
/// one that this command writes.
pub(super) fn check(
    path: &Path,
    force: bool,
    is_own: impl FnOnce(&str) -> bool,
) -> Result<(), Exit> {
    let refuse = |reason: &str| Err(Exit::Config(format!("{}: {reason}", path.display())));
    if path.is_dir() {
        return refuse("is a folder, must be the path of a file");
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
    let own = match BufReader::new(file).read_line(&mut line) {
        // Nothing is lost with an empty file.
        Ok(_) => line.is_empty() || is_own(&line),
        Err(_) => false,
    };
    if own || force {
        return Ok(());
    }
    refuse(
        "exists already and was not written by this command; choose another file or give --force",
    )
}

/// Writes `bytes` to the file at `path`, which is then whole or as it was.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Exit> {
    atomic_file::write(path, bytes)
        .map_err(|error| Exit::Run(format!("writing {}: {error}", path.display())))
}
