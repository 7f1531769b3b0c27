//! The foundation of candle-grpo: what its crates share that does not involve a model.
//!
//! | module | contents |
//! | --- | --- |
//! | [`atomic_file`] | files and folders that appear completely or not at all |
//! | [`checksum`] | SHA-256 sums as text |
//! | [`clock`] | running time, without time while the process was stopped |
//! | [`column`](mod@column) | a row's columns |
//! | [`json`] | plain messages about JSON |
//! | [`large_integers`] | JSON integers that do not fit in 64 bits |
//! | [`progress`] | progress reports and cancellation |
//! | [`secrets`] | environment variables with keys, which programs do not inherit |
//! | `server` | HTTP servers: connections, limits, keys; with the feature `server` |
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
#[cfg(feature = "server")]
pub mod server;
mod server_url;
mod template;
pub mod workers;

pub use invalid::{find_invalid, within};
pub use progress::{Interrupted, NoProgress, Progress};
pub use server_url::check_server_url;
pub use template::Template;

/// Runs the README example as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
