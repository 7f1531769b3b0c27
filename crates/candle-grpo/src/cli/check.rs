//! `grpo check`.

use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{RollFile, RunConfig};

use super::exit::Exit;
use super::load;

/// Checks the configuration in `file`, and everything that it names short of loading the model.
pub(super) fn check(file: &Path, quiet: bool) -> Result<(), Exit> {
    let run = load::config(file, |roll| match quiet {
        true => Ok(()),
        false => print_keys(roll),
    })?;
    let dataset = load::dataset(&run)?;
    check_model(&run)?;
    if dataset.held_out_in_train > 0 {
        eprintln!(
            "warning: {} of {} held-out rows ask the same as rows to train on",
            dataset.held_out_in_train,
            dataset.held_out.len()
        );
    }
    if !quiet {
        let yaml = run
            .to_yaml()
            .map_err(|error| Exit::Config(error.to_string()))?;
        let mut out = stdout().lock();
        writeln!(out, "# {}: all is well. What it comes to:", file.display())?;
        writeln!(
            out,
            "# {} prompts to train on, {} held out; {} completions a step for {} steps.",
            dataset.train.len(),
            dataset.held_out.len(),
            run.train
                .prompts_per_step
                .saturating_mul(run.train.num_generations),
            run.max_steps,
        )?;
        write!(out, "{yaml}")?;
    }
    Ok(())
}

fn check_model(run: &RunConfig) -> Result<(), Exit> {
    let path = &run.model.path;
    let missing = |path: &Path| {
        Err(Exit::Model(format!(
            "{}: there is no such file",
            path.display()
        )))
    };
    if !path.exists() {
        return missing(path);
    }
    match &run.model.chat_template {
        Some(template) if !template.exists() => missing(template),
        _ => Ok(()),
    }
}

fn print_keys(roll: &RollFile) -> Result<(), Exit> {
    let mut out = stdout().lock();
    writeln!(out, "# A file of ROLL. Its keys:")?;
    let width = roll
        .keys
        .iter()
        .map(|key| key.path.len())
        .max()
        .unwrap_or(0);
    for key in &roll.keys {
        writeln!(out, "#   {:width$}  {}", key.path, key.verdict)?;
    }
    writeln!(out, "#")?;
    Ok(())
}
