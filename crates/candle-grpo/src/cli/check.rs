//! `grpo check`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{Configuration, RollDefault, RollFile, RunConfig, SftRunConfig};
use candle_grpo::kernels::CpuInstructions;
use candle_grpo::nn::{BaseWeights, DecoderConfig, Gguf, RopeScaling};
use candle_grpo::run::RunPrompts;
use candle_grpo::train::hub::HubContent;
use candle_grpo::train::learn::MemoryPlan;
use candle_grpo::train::sft::{SftDataset, marked_text};
use candle_grpo::train::{ComputeDType, Pretrained, Prompt};
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
    let document = load::document(file)?;
    if SftRunConfig::is_of(&document) {
        return check_sft(file, load::sft_config(&document)?, quiet);
    }
    let mut run = load::config(file, |roll| match quiet {
        true => load::warn_of_keys(file, roll),
        false => print_keys(roll),
    })?;
    // The log has the warnings about the data.
    let console = Console::new(true);
    load::warn_of_threads(&run);
    let content = HubContent::ModelWithoutWeights;
    load::files(&mut run, content, &BTreeMap::new(), &console)?;
    let (dataset, checked) = match run.lacks_model_weights() && !run.model.path.is_dir() {
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
            let longest = Prompt::longest(&prompts.train);
            let plan = plan(&run, &model, longest, &prompts);
            let plan = plan.map_err(|error| Exit::Config(format!("{error:#}")))?;
            (dataset, Some((prompts, plan, longest, model)))
        }
    };
    console.finish();
    if !quiet {
        let yaml = run
            .to_yaml()
            .map_err(|error| Exit::Config(error.to_string()))?;
        let mut out = stdout().lock();
        let completions = run
            .train
            .prompts_per_step
            .saturating_mul(run.train.num_generations);
        writeln!(out, "# {}: valid. Every setting:", file.display())?;
        writeln!(
            out,
            "# {} prompts to train on, {} held out; {completions} completions a step for {} steps.",
            dataset.train.len(),
            dataset.held_out.len(),
            run.max_steps,
        )?;
        let mini_batch = run.train.mini_batch_size.unwrap_or(completions);
        let mini_batches = completions.div_ceil(mini_batch.max(1));
        writeln!(
            out,
            "# {} updates a step: {} passes over {mini_batches} mini-batches of at most {mini_batch} completions.",
            run.train.epochs.saturating_mul(mini_batches),
            run.train.epochs,
        )?;
        print_instructions(run.train.compute_dtype, &mut out)?;
        if let Some((prompts, plan, longest, model)) = checked {
            print_frequencies(&model, prompts.longest_row(&run), &mut out)?;
            if let Some(rows) = &prompts.demonstrations {
                writeln!(
                    out,
                    "# {} demonstrations with {} tokens, {} of which train.",
                    rows.train.examples.len(),
                    rows.train.num_tokens(),
                    rows.train.num_trained_tokens(),
                )?;
            }
            let length = run.train.sampling.max_new_tokens;
            let size = format!("completions of {length} tokens and a longest prompt of {longest}");
            print_plan(&plan, &size, &mut out)?;
            writeln!(
                out,
                "#   Sampling and training alternate. Reward models are not counted."
            )?;
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

/// Checks a supervised run as [`check`] does, and shows which tokens of a row train.
fn check_sft(file: &Path, mut run: SftRunConfig, quiet: bool) -> Result<(), Exit> {
    // The log has the warnings about the data.
    let console = Console::new(true);
    load::warn_of_threads(&run);
    let content = HubContent::ModelWithoutWeights;
    load::files(&mut run, content, &BTreeMap::new(), &console)?;
    // A GGUF file has the tokenizer, without which there are no tokens to check.
    let inputs = match run.lacks_model_weights() && !run.model.path.is_dir() {
        true => None,
        false => Some(load::sft_inputs(&run)?),
    };
    console.finish();
    let yaml = run
        .to_yaml()
        .map_err(|error| Exit::Config(error.to_string()))?;
    let mut text = Vec::new();
    match &inputs {
        Some((dataset, pretrained)) => print_rows(&run, dataset, pretrained, &mut text)?,
        None => writeln!(
            text,
            "# The rows were not checked: the tokenizer is in the weights of the model."
        )?,
    }
    print_hub_files(&run, &mut text)?;
    if !quiet {
        let mut out = stdout().lock();
        writeln!(out, "# {}: valid. Every setting:", file.display())?;
        out.write_all(&text)?;
        write!(out, "{yaml}")?;
    }
    Ok(())
}

/// Prints the choice between the two lists of frequencies of a model with
/// [`RopeScaling::LongRope`], whose longest row in the run has `longest` tokens.
fn print_frequencies(
    model: &DecoderConfig,
    longest: usize,
    out: &mut impl Write,
) -> Result<(), Exit> {
    if let RopeScaling::LongRope {
        original_max_position_embeddings: original,
        short_rows,
        ..
    } = model.rope_scaling
    {
        let (list, relation) = match short_rows {
            true => ("short_factor", "at most"),
            false => ("long_factor", "more than"),
        };
        let longest = match longest {
            usize::MAX => "a row with an environment may have".to_owned(),
            longest => format!("the longest row has {longest} tokens,"),
        };
        writeln!(
            out,
            "# Rotary frequencies of {list}: {longest} {relation} original_max_position_embeddings, {original}.",
        )?;
    }
    Ok(())
}

/// Prints the numbers of rows and tokens, the beginning of the first row, and the memory.
fn print_rows(
    run: &SftRunConfig,
    dataset: &SftDataset,
    pretrained: &Pretrained,
    out: &mut impl Write,
) -> Result<(), Exit> {
    let rows = &dataset.train;
    let longest = dataset.longest_row();
    print_frequencies(&pretrained.model.clone().for_rows_of(longest), longest, out)?;
    let (_, steps) = run.sft.length(rows.examples.len());
    writeln!(
        out,
        "# {} rows to train on, {} held out; {} rows a step for {steps} steps.",
        rows.examples.len(),
        dataset.held_out.examples.len(),
        run.sft.batch_size,
    )?;
    writeln!(
        out,
        "# {} tokens to train on, {} of which train; the longest row has {}. {} rows are too long and left out, {} are cut off, {} have the weight 0.",
        rows.num_tokens(),
        rows.num_trained_tokens(),
        rows.longest_kept(),
        rows.too_long,
        rows.truncated,
        rows.without_weight,
    )?;
    if let Some(first) = rows.examples.first() {
        let text = marked_text(first, &pretrained.tokenizer, SHOWN_TOKENS);
        let text = text.map_err(|error| Exit::Data(format!("{error:#}")))?;
        writeln!(
            out,
            "# The beginning of the first row, with ⟦ ⟧ around what trains:"
        )?;
        for line in text.lines() {
            writeln!(out, "#   {line}")?;
        }
    }
    let plan = MemoryPlan::supervised(&pretrained.model, &run.sft, rows.longest_kept())
        .and_then(|plan| on_this_device(plan, run));
    let plan = plan.map_err(|error| Exit::Config(format!("{error:#}")))?;
    let size = format!("rows of up to {} tokens", rows.longest_kept());
    print_plan(&plan, &size, out)
}

/// The most tokens of a row that are shown.
const SHOWN_TOKENS: usize = 200;

/// The memory of the run.
fn plan(
    run: &RunConfig,
    model: &DecoderConfig,
    longest_prompt: usize,
    prompts: &RunPrompts,
) -> anyhow::Result<MemoryPlan> {
    let demonstrations = prompts.demonstrations.as_ref();
    let longest_row = demonstrations.map_or(0, |rows| rows.train.longest_kept());
    let plan = MemoryPlan::new(model, &run.train, longest_prompt, longest_row)?;
    let plan = match &prompts.teacher {
        Some(teacher) => plan.with_teacher(teacher, run.train.compute_dtype),
        None => plan,
    };
    on_this_device(plan, run)
}

/// A plan with the program. The blocks of a GGUF file count as they are there.
fn on_this_device(mut plan: MemoryPlan, run: &impl Configuration) -> anyhow::Result<MemoryPlan> {
    let (base, dtype) = run.stored_form();
    let path = &run.model().path;
    if base == BaseWeights::Stored && !path.is_dir() {
        plan.frozen = Gguf::open(path)?.frozen_bytes(base, dtype.into())?;
        // Blocks are not packed, and a copy of another weight has the size of the weight.
        plan.packed = plan.packed.min(plan.frozen);
    }
    // The memory of the plan is that of a GPU, if there is one.
    Ok(match candle_grpo_train::cuda_is_enabled() {
        true => plan,
        false => plan.in_program(peak_of_this_process().unwrap_or(0)),
    })
}

/// The peak of the resident memory of this process, which has read the data and the tokenizer of
/// the run but no weights. `None` on systems without `/proc`.
fn peak_of_this_process() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Prints the instructions of operators on the CPU, and advises against bf16 where they have none
/// for it.
fn print_instructions(dtype: ComputeDType, out: &mut impl Write) -> Result<(), Exit> {
    let selected = CpuInstructions::selected().map_err(|error| Exit::Config(error.to_string()))?;
    writeln!(
        out,
        "# Operators on the CPU use the instructions {selected}."
    )?;
    if dtype == ComputeDType::Bf16 && selected < CpuInstructions::Avx512Bf16 {
        writeln!(
            out,
            "#   They have none for bf16, so operators convert it to f32 first. On this CPU, `compute_dtype: f32` is faster."
        )?;
    }
    Ok(())
}

/// Prints the memory that the run takes with sequences of this size.
fn print_plan(plan: &MemoryPlan, lengths: &str, out: &mut impl Write) -> Result<(), Exit> {
    let size = |bytes: usize| match bytes >> 30 {
        0..10 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    };
    writeln!(
        out,
        "# Memory: at most about {}, with {lengths}.",
        size(plan.peak()),
    )?;
    let parts = [
        ("weights", plan.weights),
        ("frozen weights", plan.frozen),
        ("reference", plan.reference),
        ("teacher", plan.teacher),
        ("critic", plan.critic),
        ("optimizer", plan.optimizer),
        ("gradients", plan.gradients),
        ("activations", plan.activations),
        ("sampling", plan.sampling),
        ("packed weights", plan.packed),
        ("allocator", plan.allocator),
        ("program and tokenizer", plan.program),
    ];
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = parts
        .map(|(name, bytes)| format!("{name} {}", size(bytes)))
        .collect();
    writeln!(out, "#   {}.", parts.join(", "))?;
    Ok(())
}

/// Prints the commits of the hub, and the weights that are to be downloaded.
fn print_hub_files(run: &impl Configuration, out: &mut impl Write) -> Result<(), Exit> {
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
    if !roll.defaults.is_empty() {
        writeln!(out, "# Left out, with another default in ROLL:")?;
        for RollDefault { key, roll, here } in &roll.defaults {
            writeln!(out, "#   {key}: {here} here, {roll} in ROLL")?;
        }
    }
    writeln!(out, "#")?;
    Ok(())
}
