//! `grpo schema`.

use std::io::{Write, stdout};

use candle_grpo::config::{run_schema, sft_schema, suite_schema};
use clap::ValueEnum;

use super::exit::Exit;

/// A kind of configuration file.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum FileKind {
    /// A run of grpo train.
    Run,
    /// A run of grpo sft.
    Sft,
    /// A suite of grpo eval.
    Suite,
}

/// Prints the JSON schema of such files.
pub(super) fn print(kind: FileKind) -> Result<(), Exit> {
    let schema = match kind {
        FileKind::Run => run_schema(),
        FileKind::Sft => sft_schema(),
        FileKind::Suite => suite_schema(),
    };
    writeln!(stdout().lock(), "{schema:#}")?;
    Ok(())
}
