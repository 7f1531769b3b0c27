//! Programs in any language that answer JSON lines.
//!
//! Use them for rewards, tools and environments that you already have in another language. A
//! program reads one JSON object per line from stdin and writes one per line to stdout. Log to
//! stderr.

mod check;
mod files;
mod imports;
#[cfg(feature = "code")]
mod isolated;
mod isolation;
mod job;
mod lines;
mod pool;
mod process;
mod sink;
mod tail;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use candle_grpo_base::secrets;
#[cfg(feature = "code")]
use candle_grpo_base::within;
use candle_grpo_core::validate::{Checked, check};

use crate::processes::Running;

pub use crate::network::Network;
pub use isolation::IsolationConfig;
pub use job::Job;
pub use lines::Lines;
pub use pool::ProgramPool;
pub(crate) use process::Process;
pub use process::{Answer, Failure, Unusable, quoted};
pub use sink::Sink;

/// Number of attempts after which a program that has never answered is an error.
pub(crate) const FIRST_ATTEMPTS: usize = 2;

/// Returns the error for a program that did not answer in its first attempts.
pub(crate) fn no_answer(attempts: usize, last: impl fmt::Display) -> anyhow::Error {
    anyhow!("no answer at all in {attempts} attempts, the last: {last}")
}

/// A program, its arguments, and time limits for its answers.
#[derive(Debug, Clone)]
pub struct Program {
    /// Name and arguments. They are not passed through a shell.
    pub command: Vec<String>,
    /// Working directory; absent: this process's.
    pub folder: Option<PathBuf>,
    /// Maximum time for an answer.
    pub limit: Duration,
    /// Additional time for the first answer.
    pub start_limit: Duration,
    /// Isolation; absent: none.
    pub isolation: Option<IsolationConfig>,
    /// Address at which the program reaches a server of this process. With a loopback interface of
    /// its own, [`Job::take_server`] returns the listener there.
    pub server: Option<SocketAddr>,
}

impl Program {
    /// Creates a program with limits in seconds.
    pub fn new(command: &[String], folder: Option<&PathBuf>, limit: f64, start_limit: f64) -> Self {
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Self {
            command: command.to_vec(),
            folder: folder.cloned(),
            limit: seconds(limit),
            start_limit: seconds(start_limit),
            isolation: None,
            server: None,
        }
    }

    /// Isolates it.
    #[must_use]
    pub fn with_isolation(self, isolation: Option<&IsolationConfig>) -> Self {
        Self {
            isolation: isolation.cloned(),
            ..self
        }
    }

    /// Checks that a program is named, and the isolation options.
    ///
    /// # Errors
    ///
    /// Fails if there is no program, or an option is invalid.
    pub fn validate(&self) -> Result<()> {
        check(
            self.command.first().is_some_and(|name| !name.is_empty()),
            "command",
            format_args!("{:?}", self.command),
            "begin with the name of a program",
        )?;
        #[cfg(feature = "code")]
        if let Some(isolation) = &self.isolation {
            let valid = isolation.validate();
            valid.map_err(|error| within("isolation", error.into()))?;
            if let Some(folder) = &self.folder {
                crate::isolation::check_visible("folder", folder)?;
            }
        }
        #[cfg(not(feature = "code"))]
        check(
            self.isolation.is_none(),
            "isolation",
            "given",
            "be absent: this program was built without the feature code",
        )?;
        Ok(())
    }

    /// Starts it in its own group, with pipes, without variables that hold keys, and with
    /// `variables`.
    fn spawn(&self, variables: &[(&str, String)]) -> Result<Running> {
        #[cfg(feature = "code")]
        if let Some(isolation) = &self.isolation {
            return isolated::start(isolation, self, variables);
        }
        let [name, arguments @ ..] = self.command.as_slice() else {
            bail!("command: empty");
        };
        let mut command = Command::new(name);
        command.args(arguments);
        self.set_environment(&mut command, variables);
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        Running::start(&mut command, Command::spawn)
    }

    /// Removes variables that hold keys, and adds `variables`.
    pub(crate) fn set_environment(&self, command: &mut Command, variables: &[(&str, String)]) {
        secrets::remove_from(command);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
    }

    /// Starts it.
    pub(crate) fn start(&self) -> Result<Process> {
        Process::start(self)
    }

    /// Starts it to exchange lines with it, whose output lines have at most `max_line` bytes. At
    /// most `max_waiting` lines wait to be received; more stay in the pipe.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be started.
    pub fn start_lines(&self, max_line: usize, max_waiting: usize) -> Result<Lines> {
        Lines::start(self, max_line, max_waiting)
    }

    /// Starts it with one input and additional environment variables. It exits on its own.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be started.
    pub fn start_job(&self, input: Vec<u8>, variables: &[(&str, String)]) -> Result<Job> {
        Job::new(self.spawn(variables)?, input)
    }

    /// Starts it as a line reader, which has [`Self::limit`] to exit after its input ends.
    pub fn start_sink(&self) -> Result<Sink> {
        Sink::start(self)
    }
}

/// Checks limits in seconds, under their configuration names.
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
