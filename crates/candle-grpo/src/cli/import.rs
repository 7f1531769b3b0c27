//! `grpo import`.

use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{Import, RunConfig};

use super::check::sizes;
use super::exit::{Exit, warn};
use super::load;

/// Prints another trainer's file as a grpo configuration. Comments explain what became of each key.
pub(super) fn import(file: &Path, processes: usize) -> Result<(), Exit> {
    let document = load::document(file)?;
    let Some(import) = Import::of_processes(&document, processes) else {
        return Err(Exit::Config(format!(
            "{}: not a file of ROLL, TRL, verl or OpenRLHF",
            file.display()
        )));
    };
    let yaml = serde_saphyr::to_string(import.document.value());
    let yaml = yaml.map_err(|error| Exit::Run(error.to_string()))?;
    let mut out = stdout().lock();
    for line in import.to_string().lines() {
        writeln!(out, "# {line}")?;
    }
    match RunConfig::new(&import.document) {
        Ok(run) => writeln!(out, "# Here: {}.", sizes(&run))?,
        // A person completes the file, with rewards for example.
        Err(error) => warn(&format!("the file is not complete yet: {error}")),
    }
    write!(out, "{yaml}")?;
    Ok(())
}
