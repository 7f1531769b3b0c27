//! Exit codes and messages.

use std::io::{self, Write};
use std::process::ExitCode;

use candle_grpo::config::ConfigError;
use candle_grpo::train::ErrorKind;

/// The exit codes, for `--help`.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  another error, such as a full disk
  2  invalid command line
  3  invalid configuration
  4  invalid data
  5  invalid model
  6  a loss, gradient or weight is not finite
  7  interrupted; the run is saved
  130  stopped at once by a second Ctrl-C, without saving";

/// The reason why the program ends early.
#[derive(Debug)]
pub(super) enum Exit {
    /// Invalid configuration.
    Config(String),
    /// Invalid data.
    Data(String),
    /// Invalid model.
    Model(String),
    /// A loss, gradient or weight is not finite.
    NotFinite(String),
    /// Interrupted.
    Interrupted(String),
    /// Another error.
    Run(String),
    /// Standard output is closed.
    Quiet,
}

impl Exit {
    /// Returns the exit for data that do not fit: with the key if the error names one, otherwise
    /// with the file.
    pub(super) fn from_data(error: anyhow::Error) -> Self {
        match error.downcast::<ConfigError>() {
            Ok(error) => Self::Config(error.to_string()),
            Err(error) => Self::Data(format!("{error:#}")),
        }
    }

    /// Returns the exit for suite data that cannot be read or downloaded.
    pub(super) fn from_suite(error: anyhow::Error) -> Self {
        match ErrorKind::of(&error) {
            ErrorKind::Interrupted | ErrorKind::Transfer(_) => Self::from_hub(error),
            _ => Self::from_data(error),
        }
    }

    /// Returns the exit for hub files that cannot be located: with the key if the error names one,
    /// otherwise with the model on the command line.
    pub(super) fn from_hub(error: anyhow::Error) -> Self {
        let message = format!("{error:#}");
        match ErrorKind::of(&error) {
            ErrorKind::Interrupted => {
                Self::Interrupted("Complete files stay in the hub cache.".to_owned())
            }
            _ if error.is::<ConfigError>() => Self::Config(message),
            ErrorKind::Transfer(_) => Self::Run(message),
            _ => Self::Model(message),
        }
    }

    /// Returns the exit for a run that ended with `error`, with a hint on how to continue.
    pub(super) fn from_run(error: anyhow::Error, hint: String) -> Self {
        let message = format!("{error:#}\n{hint}");
        match ErrorKind::of(&error) {
            ErrorKind::NotFinite(_) => Self::NotFinite(message),
            _ => Self::Run(message),
        }
    }

    /// Prints the reason on stderr and returns the exit code.
    pub(super) fn report(self) -> ExitCode {
        ExitCode::from(self.report_as("error"))
    }

    /// [`Self::report`] for one rank in a job.
    pub(super) fn report_of_rank(self, rank: usize) -> u8 {
        self.report_as(&format!("error of rank {rank}"))
    }

    fn report_as(self, what: &str) -> u8 {
        let (code, message) = match self {
            Self::Config(message) => (3, message),
            Self::Data(message) => (4, message),
            Self::Model(message) => (5, message),
            Self::NotFinite(message) => (6, message),
            Self::Interrupted(message) => {
                complain(&format!("interrupted\n{message}"));
                return 7;
            }
            Self::Run(message) => (1, message),
            Self::Quiet => return 0,
        };
        complain(&format!("{what}: {message}"));
        code
    }
}

impl From<io::Error> for Exit {
    /// Converts a standard output error.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // The reader has ended, such as `head`.
            io::ErrorKind::BrokenPipe => Self::Quiet,
            _ => Self::Run(format!("standard output: {error}")),
        }
    }
}

/// Prints a warning on stderr.
pub(super) fn warn(message: &str) {
    complain(&format!("warning: {message}"));
}

/// Prints a line on stderr, which may be closed.
fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "{message}");
}
