//! Programs in any language that answer lines of JSON.

mod files;
mod group;
mod imports;
mod job;
mod pool;
mod process;
mod running;
mod sink;
mod tail;

use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use candle_grpo_base::secrets;
use candle_grpo_core::validate::{Checked, check};

pub use job::Job;
pub use pool::ProgramPool;
pub(crate) use process::Process;
pub use process::{Answer, Failure, Unusable, quoted};
pub(crate) use running::Running;
pub use sink::Sink;

/// The attempts after which a program that has never answered is an error.
pub(crate) const FIRST_ATTEMPTS: usize = 2;

/// Returns the error of a program that has not answered in its first attempts.
pub(crate) fn no_answer(attempts: usize, last: impl fmt::Display) -> anyhow::Error {
    anyhow!("no answer at all in {attempts} attempts, the last: {last}")
}

/// A program, its arguments, and the time that its answers may take.
#[derive(Debug, Clone)]
pub struct Program {
    /// The name and the arguments. No shell is in between.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    pub folder: Option<PathBuf>,
    /// The longest time for an answer.
    pub limit: Duration,
    /// The longest time for the first answer, in addition.
    pub start_limit: Duration,
}

impl Program {
    /// Takes limits in seconds.
    pub fn new(command: &[String], folder: Option<&PathBuf>, limit: f64, start_limit: f64) -> Self {
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Self {
            command: command.to_vec(),
            folder: folder.cloned(),
            limit: seconds(limit),
            start_limit: seconds(start_limit),
        }
    }

    /// Checks that a program is named.
    pub fn validate(&self) -> Checked {
        check(
            self.command.first().is_some_and(|name| !name.is_empty()),
            "command",
            format_args!("{:?}", self.command),
            "begin with the name of a program",
        )
    }

    /// Starts it in a group of its own, with pipes, without the variables that have keys, and with
    /// `variables`.
    fn spawn(&self, variables: &[(&str, String)]) -> Result<Running> {
        let [name, arguments @ ..] = self.command.as_slice() else {
            bail!("command: empty");
        };
        let mut command = Command::new(name);
        command.args(arguments);
        for variable in secrets::hidden_variables() {
            command.env_remove(variable);
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        Running::start(&mut command, Command::spawn)
    }

    /// Starts it.
    pub(crate) fn start(&self) -> Result<Process> {
        Process::start(self)
    }

    /// Starts it with one input and more environment variables. It ends by itself.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start_job(&self, input: Vec<u8>, variables: &[(&str, String)]) -> Result<Job> {
        Job::start(self, input, variables)
    }

    /// Starts it as a reader of lines, which has [`Self::limit`] to end after its input.
    pub fn start_sink(&self) -> Result<Sink> {
        Sink::start(self)
    }
}

/// Checks limits in seconds, under the names that configurations have for them.
pub fn check_limits(limit: f64, start_limit: f64) -> Checked {
    check(
        limit > 0. && limit <= 1e9,
        "time_limit_seconds",
        limit,
        "be above 0 and at most 1e9",
    )?;
    check(
        (0. ..=1e9).contains(&start_limit),
        "start_limit_seconds",
        start_limit,
        "be from 0 to 1e9",
    )
}
