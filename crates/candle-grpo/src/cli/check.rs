//! `grpo check`.

use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::RollFile;
use candle_grpo_collective::launch;

use super::console::Console;
use super::exit::Exit;
use super::load;

/// Checks the configuration in `file` with everything that it names, except the weights of the
/// model.
pub(super) fn check(file: &Path, quiet: bool) -> Result<(), Exit> {
    let environment = launch::environment().map_err(|error| Exit::Run(error.to_string()))?;
    // One rank prints what all of them check.
    let quiet = quiet || environment.is_some_and(|environment| environment.rank > 0);
    let run = load::config(file, |roll| match quiet {
        true => load::warn_of_keys(file, roll),
        false => print_keys(roll),
    })?;
    // The log has the warnings about the data.
    let console = Console::new(true);
    let (dataset, _) = load::prompts(&run)?;
    console.finish();
    if !quiet {
        let yaml = run
            .to_yaml()
            .map_err(|error| Exit::Config(error.to_string()))?;
        let mut out = stdout().lock();
        writeln!(out, "# {}: valid. Every setting:", file.display())?;
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
        if let Some(found) = environment {
            writeln!(
                out,
                "# Rank {} of {}, number {} on its machine ({:?}).",
                found.rank, found.world_size, found.local_rank, found.launcher
            )?;
        }
        write!(out, "{yaml}")?;
    }
    Ok(())
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
