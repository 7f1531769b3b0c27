//! Shell completions.

use std::io::{Write, stdout};

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use super::exit::Exit;

/// Prints the script for `shell`.
pub(super) fn print(shell: Shell) -> Result<(), Exit> {
    let mut script = Vec::new();
    generate(shell, &mut super::Arguments::command(), "grpo", &mut script);
    stdout().write_all(&script)?;
    Ok(())
}
