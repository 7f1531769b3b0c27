//! Python interpreters.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_grpo_base::secrets;

use super::command_line::text;
use super::paths::real_path;

/// Prints the interpreter and the directories that it reads.
const FIND: &str = "\
import os, sys
assert sys.version_info >= (3, 6)
folder = os.path.dirname(os.path.dirname(sys.executable))
settings = os.path.join(folder, 'pyvenv.cfg')
print('\\n'.join([sys.executable, os.path.realpath(sys.executable), settings, sys.prefix,
    sys.base_prefix, sys.exec_prefix] + sys.path))";

/// An interpreter.
pub(crate) struct Interpreter {
    /// Its own path, without launchers, and its options.
    pub(crate) command: Vec<String>,
    /// Files and directories that it needs.
    pub(crate) files: Vec<PathBuf>,
}

impl Interpreter {
    /// Queries the interpreter that `command` starts.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be started, or is not Python 3.6 or newer.
    pub(crate) fn find(command: &[String]) -> Result<Self> {
        let (name, options) = command.split_first().context("python: empty")?;
        let mut asked = Command::new(name);
        // It may run files of its installation, such as those of a virtual environment.
        secrets::remove_from(&mut asked);
        let output = asked
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
        let mut words = vec![text(&executable)];
        words.extend_from_slice(options);
        let files = std::iter::once(executable.as_path()).chain(paths);
        Ok(Self {
            files: files.map(Path::to_path_buf).collect(),
            command: words,
        })
    }
}
