//! Command line arguments.

use std::path::PathBuf;

use clap::Parser;

/// Times each fused operator next to its composed twin.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Only operators whose name contains this
    #[arg(long, default_value = "")]
    pub(crate) only: String,
    /// Measured runs per side, whose median is reported
    #[arg(long, default_value_t = 9)]
    pub(crate) rounds: usize,
    /// Folder for ops.json and ops.md
    #[arg(long, default_value = "target/bench")]
    pub(crate) out: PathBuf,
    /// Run the cases named on standard input, one per line, and print each one's milliseconds
    #[arg(long)]
    pub(crate) serve: bool,
}
