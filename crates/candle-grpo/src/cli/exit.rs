//! How the program ends.

use std::io::{self, Write};
use std::process::ExitCode;

use candle_grpo::train::NotFinite;

/// The exit codes, for `--help`.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0  all is well
  1  something else went wrong, such as a full disk
  2  the command line is wrong
  3  the configuration is wrong
  4  the data are wrong
  5  the model is wrong
  6  a loss, gradient or weight was not finite
  7  the run was interrupted, and has saved where it was
  130  it was stopped at once, by a second Ctrl-C";

/// Why the program ends before it is done.
#[derive(Debug)]
pub(super) enum Exit {
    /// The configuration is wrong.
    Config(String),
    /// The data are wrong.
    Data(String),
    /// The model is wrong.
    Model(String),
    /// A loss, a gradient or a weight was not finite.
    NotFinite(String),
    /// It was asked to stop.
    Interrupted(String),
    /// Something else went wrong.
    Run(String),
    /// What it prints is not read.
    Quiet,
}

impl Exit {
    /// Of a run that ended with `error`; `hint` says how to go on.
    pub(super) fn of_run(error: anyhow::Error, hint: String) -> Self {
        let message = format!("{error:#}\n{hint}");
        match error.is::<NotFinite>() {
            true => Self::NotFinite(message),
            false => Self::Run(message),
        }
    }

    /// Says why on stderr.
    pub(super) fn report(self) -> ExitCode {
        let (code, message) = match self {
            Self::Config(message) => (3, message),
            Self::Data(message) => (4, message),
            Self::Model(message) => (5, message),
            Self::NotFinite(message) => (6, message),
            Self::Interrupted(message) => {
                complain(&format!("interrupted\n{message}"));
                return ExitCode::from(7);
            }
            Self::Run(message) => (1, message),
            Self::Quiet => return ExitCode::SUCCESS,
        };
        complain(&format!("error: {message}"));
        ExitCode::from(code)
    }
}

impl From<io::Error> for Exit {
    /// Of what is printed.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // The reader has gone, as `head` does.
            io::ErrorKind::BrokenPipe => Self::Quiet,
            _ => Self::Run(format!("standard output: {error}")),
        }
    }
}

/// There may be nobody to read it.
fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "{message}");
}
