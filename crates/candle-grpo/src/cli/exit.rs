//! How the program ends.

use std::process::ExitCode;

/// The exit codes, for `--help`.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0  all is well
  2  the command line is wrong
  3  the configuration is wrong
  4  the data are wrong
  5  the model is wrong
  6  a loss or gradient was not finite
  7  the run was interrupted";

/// Why the program ends before it is done. The codes of a model (5), of numbers that are not finite (6) and of an interruption
/// (7) belong to commands that train.
#[derive(Debug)]
pub(super) enum Exit {
    /// The configuration is wrong.
    Config(String),
    /// The data are wrong.
    Data(String),
    /// The model is wrong.
    Model(String),
    /// What it prints is not read.
    Quiet,
}

impl Exit {
    /// Says why on stderr.
    pub(super) fn report(self) -> ExitCode {
        let (code, message) = match self {
            Self::Config(message) => (3, message),
            Self::Data(message) => (4, message),
            Self::Model(message) => (5, message),
            Self::Quiet => return ExitCode::SUCCESS,
        };
        eprintln!("error: {message}");
        ExitCode::from(code)
    }
}
