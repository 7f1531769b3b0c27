//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Times each fused operator beside its composed twin.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Only operators whose name contains this
    #[arg(long, default_value = "")]
    pub(crate) only: String,
    /// Measured runs of each side; the median counts
    #[arg(long, default_value_t = 9)]
    pub(crate) rounds: usize,
    /// Where ops.json and ops.md go
    #[arg(long, default_value = "target/bench")]
    pub(crate) out: PathBuf,
    /// Run cases named on standard input instead, one a line, and answer each with its milliseconds
    #[arg(long)]
    pub(crate) serve: bool,
}
