//! `grpo check`.

use std::collections::BTreeMap;
use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{RollFile, RunConfig};
use candle_grpo::train::hub::HubContent;
use candle_grpo_collective::launch;

use super::console::Console;
use super::exit::Exit;
use super::load;

/// Checks the configuration in `file` with everything that it names, except the weights of the
/// model. Of models on the hub it downloads everything else.
pub(super) fn check(file: &Path, quiet: bool) -> Result<(), Exit> {
    let environment = launch::environment().map_err(|error| Exit::Run(error.to_string()))?;
    // One rank prints what all of them check.
    let quiet = quiet || environment.is_some_and(|environment| environment.rank > 0);
    let mut run = load::config(file, |roll| match quiet {
        true => load::warn_of_keys(file, roll),
        false => print_keys(roll),
    })?;
    // The log has the warnings about the data.
    let console = Console::new(true);
    let content = HubContent::ModelWithoutWeights;
    load::files(&mut run, content, &BTreeMap::new(), &console)?;
    let dataset = match run.lacks_model_weights() && !run.model.path.is_dir() {
        // A GGUF file has the tokenizer, too.
        true => {
            load::check_settings(&run)?;
            run.load_data().map_err(Exit::from_data)?
        }
        false => load::prompts(&run)?.0,
    };
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
        print_hub_files(&run, &mut out)?;
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

/// Prints the commits of the hub, and the weights that are to be downloaded.
fn print_hub_files(run: &RunConfig, out: &mut impl Write) -> Result<(), Exit> {
    for (repository, commit) in run.hub_commits() {
        writeln!(out, "# {repository}: commit {commit}.")?;
    }
    for (name, files) in run.missing_weights() {
        let bytes: u64 = files.iter().filter_map(|file| file.bytes).sum();
        let count = files.len();
        writeln!(
            out,
            "# {name}: the weights are not in the cache and were not checked; {:.1} MB in {count} {} to download.",
            bytes as f64 / 1e6,
            if count == 1 { "file" } else { "files" }
        )?;
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
