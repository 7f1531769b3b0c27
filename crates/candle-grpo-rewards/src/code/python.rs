//! The Python interpreter, and the program that runs assertions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_base::secrets;
use serde_json::json;

use super::case::Case;
use super::sandbox::real_path;
use super::statements::{CHECKS, EXITS};

pub(super) const DRIVER: &str = include_str!("driver.py");

/// Prints the interpreter and the directories that it reads.
const FIND: &str = "\
import os, sys
assert sys.version_info >= (3, 6)
folder = os.path.dirname(os.path.dirname(sys.executable))
settings = os.path.join(folder, 'pyvenv.cfg')
print('\\n'.join([sys.executable, os.path.realpath(sys.executable), settings, sys.prefix,
    sys.base_prefix, sys.exec_prefix] + sys.path))";

/// An interpreter.
pub(super) struct Interpreter {
    /// Its own path, without launchers, and its options.
    pub(super) command: Vec<String>,
    /// Files and directories that it needs.
    pub(super) files: Vec<PathBuf>,
}

impl Interpreter {
    /// Queries the interpreter that `command` starts.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be started, or is not Python 3.6 or newer.
    pub(super) fn find(command: &[String]) -> Result<Self> {
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
        let mut words = vec![executable.to_string_lossy().into_owned()];
        words.extend_from_slice(options);
        let files = std::iter::once(executable.as_path()).chain(paths);
        Ok(Self {
            files: files.map(Path::to_path_buf).collect(),
            command: words,
        })
    }
}

/// Names that a program may expect if its prompt has a function signature: type hints, and modules
/// that such data sets import.
const BEFORE_FUNCTIONS: &str = "\
from typing import *
from collections import *
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re
import string, sys";

/// Returns the driver's input, for a test that is not an input and output pair.
pub(super) fn driver_input(program: &str, case: &Case, marker: &str) -> Result<Vec<u8>> {
    let (before, test) = match case {
        Case::Output { .. } => bail!("a pair of input and output is no test of the driver"),
        Case::Assertions {
            text,
            candidates,
            entry,
        } => {
            let before = if candidates.is_empty() {
                ""
            } else {
                BEFORE_FUNCTIONS
            };
            let test = json!({
                "text": text,
                "candidates": candidates,
                "entry": entry,
                "checks": CHECKS,
                "exits": EXITS,
            });
            (before, test)
        }
        Case::Call {
            function,
            arguments,
            expected,
        } => {
            let test = json!({"function": function, "arguments": arguments, "expected": expected});
            (BEFORE_FUNCTIONS, test)
        }
    };
    let pieces = [before, program, &test.to_string(), marker];
    let pieces = pieces.map(|piece| format!("{:016}{piece}", piece.len()));
    Ok(pieces.concat().into_bytes())
}
