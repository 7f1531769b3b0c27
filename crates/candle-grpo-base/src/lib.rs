//! The ground of candle-grpo: parts that its crates share and that have no notion of a model.
//!
//! | module | contents |
//! | --- | --- |
//! | [`atomic_file`] | files and folders that appear completely or not at all |
//! | [`checksum`] | SHA-256 sums as text |
//! | [`clock`] | time without that in which the process stood still |
//! | [`column`](mod@column) | the columns of a row |
//! | [`json`] | plain messages about JSON |
//! | [`large_integers`] | integers of JSON that no 64 bits hold |
//! | [`progress`] | observation and cancellation of long work |
//! | [`secrets`] | environment variables with keys, which programs do not inherit |
//! | [`workers`] | threads that work through a list of jobs |

#![warn(clippy::missing_errors_doc)]

pub mod atomic_file;
pub mod checksum;
pub mod clock;
pub mod column;
mod invalid;
pub mod json;
pub mod large_integers;
pub mod progress;
pub mod secrets;
mod server_url;
mod template;
pub mod workers;

pub use invalid::{find_invalid, within};
pub use progress::{Interrupted, NoProgress, Progress};
pub use server_url::check_server_url;
pub use template::Template;

/// Runs the code of the README as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
