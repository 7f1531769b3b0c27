//! `grpo check`.

use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{Document, RollFile, RunConfig};
use candle_grpo::train::Dataset;

use super::exit::Exit;

/// Checks the configuration in `file`, and everything that it names short of loading the model.
pub(super) fn check(file: &Path, quiet: bool) -> Result<(), Exit> {
    let config = |error: candle_grpo::config::ConfigError| Exit::Config(error.to_string());
    let document = Document::read(file).map_err(config)?;
    let document = match RollFile::new(&document) {
        Some(roll) => {
            if !quiet {
                print_keys(&roll)?;
            }
            roll.document
        }
        None => document,
    };
    let run = RunConfig::new(&document).map_err(config)?;
    let dataset = check_data(&run)?;
    check_model(&run)?;
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
            run.train.prompts_per_step * run.train.num_generations,
            run.max_steps,
        )?;
        write!(out, "{yaml}")?;
    }
    Ok(())
}

/// Reads the data, and asks the rewards whether each row has what they need.
fn check_data(run: &RunConfig) -> Result<Dataset, Exit> {
    let data = |error: anyhow::Error| Exit::Data(format!("{error:#}"));
    let dataset = run.data.load(run.seed()).map_err(data)?;
    for row in dataset.train.iter().chain(&dataset.held_out) {
        for reward in &run.rewards {
            reward
                .check_row(&row.columns)
                .map_err(|error| data(error.context(row.place())))?;
        }
    }
    Ok(dataset)
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
