//! The Python interpreter, and the program that runs assertions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::sandbox::real_path;

pub(super) const DRIVER: &str = include_str!("driver.py");

/// Prints the interpreter and the folders that it reads.
const FIND: &str = "\
import os, sys
assert sys.version_info >= (3, 6)
folder = os.path.dirname(os.path.dirname(sys.executable))
settings = os.path.join(folder, 'pyvenv.cfg')
print('\\n'.join([sys.executable, os.path.realpath(sys.executable), settings, sys.prefix,
    sys.base_prefix, sys.exec_prefix] + sys.path))";

/// An interpreter.
pub(super) struct Interpreter {
    /// Its own path, without programs that choose one, and its options.
    pub(super) command: Vec<String>,
    /// The files and folders that it needs.
    pub(super) files: Vec<PathBuf>,
}

impl Interpreter {
    /// Asks the interpreter that `command` starts.
    ///
    /// # Errors
    ///
    /// If it cannot be started, or is not Python 3.6 or newer.
    pub(super) fn find(command: &[String]) -> Result<Self> {
        let (name, options) = command.split_first().context("python: empty")?;
        let output = Command::new(name)
            .args(options)
            .args(["-c", FIND])
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("python: {name:?} cannot be started"))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "python: {command:?}, must start Python 3.6 or newer: {}",
            errors.trim()
        );
        let paths = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut paths = paths.lines().filter(|path| !path.is_empty()).map(Path::new);
        let executable = paths.next().and_then(real_path);
        let executable = executable.with_context(|| format!("python: {command:?}, has no path"))?;
        let mut words = vec![executable.to_string_lossy().into_owned()];
        words.extend_from_slice(options);
        let files = std::iter::once(executable.as_path()).chain(paths);
        Ok(Self {
            files: files.map(Path::to_path_buf).collect(),
            command: words,
        })
    }
}

/// The input of the driver.
pub(super) fn driver_input(program: &str, test: &str, marker: &str) -> Vec<u8> {
    let pieces = [program, test, marker];
    let pieces = pieces.map(|piece| format!("{:016}{piece}", piece.len()));
    pieces.concat().into_bytes()
}
