//! `grpo check`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{RollFile, RunConfig};
use candle_grpo::nn::{BaseWeights, DecoderConfig, Gguf};
use candle_grpo::train::hub::HubContent;
use candle_grpo::train::learn::MemoryPlan;
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
    let (dataset, plan) = match run.lacks_model_weights() && !run.model.path.is_dir() {
        // A GGUF file has the tokenizer, too.
        true => {
            load::check_settings(&run)?;
            (run.load_data().map_err(Exit::from_data)?, None)
        }
        false => {
            let load::Inputs {
                dataset,
                prompts,
                model,
            } = load::inputs(&run)?;
            let lengths = prompts.train.iter().map(|prompt| prompt.tokens.len());
            let longest = lengths.max().unwrap_or(0);
            let plan = plan(&run, &model, longest);
            let plan = plan.map_err(|error| Exit::Config(format!("{error:#}")))?;
            (dataset, Some((plan, longest)))
        }
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
        if let Some((plan, longest)) = plan {
            print_plan(&run, &plan, longest, &mut out)?;
        }
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

/// The memory of the run. The blocks of a GGUF file count as they are there.
fn plan(
    run: &RunConfig,
    model: &DecoderConfig,
    longest_prompt: usize,
) -> anyhow::Result<MemoryPlan> {
    let mut plan = MemoryPlan::new(model, &run.train, longest_prompt)?;
    let (base, dtype) = run.train.stored_form();
    if base == BaseWeights::Stored && !run.model.path.is_dir() {
        plan.frozen = Gguf::open(&run.model.path)?.frozen_bytes(base, dtype.into())?;
    }
    // The memory of the plan is that of a GPU, if there is one.
    if !candle_core::utils::cuda_is_available() {
        plan.program = peak_of_this_process().unwrap_or(0);
    }
    Ok(plan)
}

/// The peak of the resident memory of this process, which has read the data and the tokenizer of
/// the run but no weights. It includes memory that the allocator keeps. `None` on systems without
/// `/proc`.
fn peak_of_this_process() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Prints the memory that the run takes, if its completions are as long as they can be.
fn print_plan(
    run: &RunConfig,
    plan: &MemoryPlan,
    longest_prompt: usize,
    out: &mut impl Write,
) -> Result<(), Exit> {
    let size = |bytes: usize| match bytes >> 30 {
        0..10 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    };
    writeln!(
        out,
        "# Memory: at most about {}, with completions of {} tokens and a longest prompt of {longest_prompt}.",
        size(plan.peak()),
        run.train.sampling.max_new_tokens,
    )?;
    let parts = [
        ("weights", plan.weights),
        ("frozen weights", plan.frozen),
        ("reference", plan.reference),
        ("critic", plan.critic),
        ("optimizer", plan.optimizer),
        ("gradients", plan.gradients),
        ("activations", plan.activations),
        ("sampling", plan.sampling),
        ("program, tokenizer, allocator", plan.program),
    ];
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = parts
        .map(|(name, bytes)| format!("{name} {}", size(bytes)))
        .collect();
    writeln!(out, "#   {}.", parts.join(", "))?;
    writeln!(
        out,
        "#   Sampling and training alternate. Reward models are not counted."
    )?;
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
