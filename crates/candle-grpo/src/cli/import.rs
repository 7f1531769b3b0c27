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
    let import = Import::of_processes(&document, processes);
    if import.is_none() && !document.is_former() {
        return Err(Exit::Config(format!(
            "{}: not a file of ROLL, TRL, verl, OpenRLHF or an earlier version",
            file.display()
        )));
    }
    let translated = import.as_ref().map_or(&document, |import| &import.document);
    let native = translated.native();
    let native = native.map_err(|error| Exit::Config(error.to_string()))?;
    let yaml = serde_saphyr::to_string(native.value());
    let yaml = yaml.map_err(|error| Exit::Run(error.to_string()))?;
    let mut out = stdout().lock();
    let report = import.as_ref().map_or(String::new(), Import::to_string);
    for line in report.lines() {
        writeln!(out, "# {line}")?;
    }
    match RunConfig::new(&native) {
        Ok(run) => writeln!(out, "# Here: {}.", sizes(&run))?,
        // A person completes the file, with rewards for example.
        Err(error) => warn(&format!("the file is not complete yet: {error}")),
    }
    write!(out, "{yaml}")?;
    Ok(())
}
