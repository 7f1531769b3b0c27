//! `grpo check`.

use std::collections::BTreeMap;
use std::io::{Write, stdout};
use std::path::Path;

use candle_grpo::config::{
    Algorithm, Configuration, RunConfig, SftRunConfig, Sizes, TeacherConfig,
};
use candle_grpo::kernels::CpuInstructions;
use candle_grpo::nn::{DecoderConfig, RopeScaling};
use candle_grpo::report::Run;
use candle_grpo::run::{RankPlans, RunMemory, RunPrompts, sft_memory};
use candle_grpo::train::hub::HubContent;
use candle_grpo::train::learn::{MemoryPlan, ReferenceRefresh};
use candle_grpo::train::sft::{SftDataset, marked_text};
use candle_grpo::train::{ComputeDType, Dataset, Pretrained, Prompt};
use candle_grpo_collective::launch;
use candle_grpo_core::validate::Name;
use serde::Serialize;

use super::console::Console;
use super::exit::Exit;
use super::load;

/// The output of [`check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Detail {
    /// Nothing.
    Quiet,
    /// The model, data, batch, algorithm and memory.
    Summary,
    /// The summary as comments in a file with every setting.
    All,
}

impl Detail {
    /// Prints `text`, and the settings of `file` as the level of detail requires.
    fn print(self, file: &Path, text: &[u8], settings: &str) -> Result<(), Exit> {
        let mut out = stdout().lock();
        let text = String::from_utf8_lossy(text);
        match self {
            Self::Quiet => {}
            Self::Summary => write!(out, "{}: valid.\n{text}", file.display())?,
            Self::All => {
                writeln!(out, "# {}: valid. Every setting:", file.display())?;
                for line in text.lines() {
                    writeln!(out, "# {line}")?;
                }
                write!(out, "{settings}")?;
            }
        }
        Ok(())
    }
}

/// Checks the configuration in `file` and everything that it names, except the model weights.
/// Downloads everything else from the hub. The memory is that on one of `ranks`, or of the
/// launcher's.
pub(super) fn check(
    file: &Path,
    detail: Detail,
    allow_unsupported: bool,
    ranks: Option<usize>,
) -> Result<(), Exit> {
    let environment = launch::environment().map_err(|error| Exit::Run(error.to_string()))?;
    // One rank prints what all of them check.
    let detail = match &environment {
        Some(environment) if environment.rank > 0 => Detail::Quiet,
        _ => detail,
    };
    let document = load::document(file)?;
    if SftRunConfig::is_of(&document) {
        return check_sft(file, load::sft_config(&document)?, detail, ranks);
    }
    let import = load::import(&document, allow_unsupported)?;
    let mut run = match &import {
        Some(import) => {
            load::warn_of_keys(import);
            load::config(&import.document)?
        }
        None => load::config(&document)?,
    };
    // The log has the warnings about the data.
    let console = Console::new(true);
    load::set_threads(&run)?;
    let content = HubContent::ModelWithoutWeights;
    load::files(&mut run, content, &BTreeMap::new(), &console)?;
    let (dataset, checked) = if run.lacks_model_weights() && !run.model.path.is_dir() {
        // A GGUF file has the tokenizer, too.
        load::check_settings(&run)?;
        (run.load_data().map_err(Exit::from_data)?, None)
    } else {
        let load::Inputs {
            dataset,
            prompts,
            model,
        } = load::inputs(&run)?;
        let longest = Prompt::longest(&prompts.train);
        let memory = Memory::new(&run, &model, &prompts, ranks);
        let memory = memory.map_err(|error| Exit::Config(format!("{error:#}")))?;
        (dataset, Some((prompts, memory, longest, model)))
    };
    console.finish();
    let settings = run
        .to_yaml()
        .map_err(|error| Exit::Config(error.to_string()))?;
    let mut out = Vec::new();
    if let Some(import) = &import {
        match detail {
            Detail::All => write!(out, "{import}")?,
            _ => write!(out, "{}", import.summary())?,
        }
        print_sizes(&run, &mut out)?;
    }
    print_model(&run, checked.as_ref().map(|(.., model)| model), &mut out)?;
    print_batch(&run, &dataset, &mut out)?;
    print_algorithm(&run, &mut out)?;
    print_instructions(run.train.compute_dtype, &mut out)?;
    if let Some((prompts, memory, longest, model)) = checked {
        print_frequencies(&model, prompts.longest_row(&run), &mut out)?;
        if let Some(rows) = prompts.other_rows(&run) {
            writeln!(out, "{rows}")?;
        }
        let length = run.train.sampling.max_new_tokens;
        let size = format!("completions of {length} tokens and prompts of at most {longest}");
        print_plan(&memory.plan, &size, &mut out)?;
        writeln!(
            out,
            "  Sampling and training alternate. Reward models are not counted."
        )?;
        if let Some(tokens) = memory.fitted_tokens {
            writeln!(out, "  micro_batch_tokens: auto is {tokens} here.")?;
        }
        if let Some(advice) = &memory.advice {
            writeln!(out, "  This is {advice}.")?;
        }
        print_shardings(&memory.of_ranks, &mut out)?;
    }
    print_speed(&run, &mut out)?;
    print_hub_files(&run, &mut out)?;
    if let Some(found) = environment {
        writeln!(
            out,
            "Rank {} of {}, number {} on its machine ({:?}).",
            found.rank, found.world_size, found.local_rank, found.launcher
        )?;
    }
    detail.print(file, &out, &settings)
}

/// Prints the model, its size if its shape is known, and which weights train.
fn print_model(
    run: &RunConfig,
    model: Option<&DecoderConfig>,
    out: &mut impl Write,
) -> Result<(), Exit> {
    let size = model.map_or(String::new(), |model| {
        let shapes = model.parameter_shapes();
        let weights: usize = shapes.values().map(|shape| shape.elem_count()).sum();
        let (unit, count) = match weights {
            0..1_000_000 => ("thousand", 1e3),
            1_000_000..1_000_000_000 => ("million", 1e6),
            _ => ("billion", 1e9),
        };
        format!(", {:.1} {unit} parameters", weights as f64 / count)
    });
    let trained = match &run.train.adapters {
        Some(adapters) => format!("rank-{} adapters", adapters.rank),
        None => "all of them".to_owned(),
    };
    let path = run.model.path.display();
    writeln!(
        out,
        "Model: {path}{size}; trains {trained}, computing in {}.",
        name(&run.train.compute_dtype)
    )?;
    if let Some(teacher) = &run.teacher {
        writeln!(out, "Teacher: {}.", describe(teacher))?;
    }
    Ok(())
}

/// Describes a teacher, or several.
fn describe(teacher: &TeacherConfig) -> String {
    if let Some(column) = &teacher.by {
        let models = teacher.models.iter();
        let models = models.map(|(name, teacher)| format!("{name}: {}", describe(teacher)));
        let models: Vec<String> = models.collect();
        return format!("by the column {column:?}; {}", models.join("; "));
    }
    match (&teacher.model, &teacher.own) {
        (Some(path), _) => path.display().to_string(),
        (None, None) => "a server".to_owned(),
        (None, Some(own)) => {
            let schedule = match own.refresh {
                None => "frozen".to_owned(),
                Some(ReferenceRefresh { every_steps, alpha }) => {
                    format!("updated every {every_steps} steps with weight {alpha}")
                }
            };
            let prompt = match (&own.prompt_column, &own.prompt) {
                (Some(column), _) => format!("the column {column:?} as its prompt"),
                (None, prompt) => format!("the prompt {:?}", prompt.as_deref().unwrap_or("")),
            };
            format!("the policy, {schedule}, with {prompt}")
        }
    }
}

/// Returns a choice's name in configuration files.
fn name(choice: &impl Serialize) -> String {
    let value = serde_json::to_value(choice).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

/// Prints the data, the rewards, and the step sizes.
fn print_batch(run: &RunConfig, dataset: &Dataset, out: &mut impl Write) -> Result<(), Exit> {
    let train = &run.train;
    let (prompts, group) = (train.prompts_per_step, train.num_generations);
    let completions = prompts.saturating_mul(group);
    let mut rewards: Vec<String> = run
        .rewards
        .iter()
        .map(|reward| match reward.weight {
            1. => reward.name(),
            weight => format!("{weight} x {}", reward.name()),
        })
        .collect();
    writeln!(
        out,
        "Data: {} training prompts, {} held out.",
        dataset.train.len(),
        dataset.held_out.len(),
    )?;
    let environment = run.environment.as_ref();
    if environment.is_some_and(|environment| environment.gives_rewards()) {
        rewards.push("environment".to_owned());
    }
    if rewards.is_empty() {
        rewards.push("none, the teacher decides".to_owned());
    }
    writeln!(out, "Rewards: {}.", rewards.join(" + "))?;
    let mini_batch = train.mini_batch_size.unwrap_or(completions);
    let mini_batches = completions.div_ceil(mini_batch.max(1));
    writeln!(
        out,
        "Steps: {}, each with {prompts} prompts x {group} = {completions} completions of at most {} tokens, at temperature {}.",
        run.max_steps, train.sampling.max_new_tokens, train.sampling.temperature,
    )?;
    writeln!(
        out,
        "Updates per step: {} ({} x {mini_batches} mini-batches of at most {mini_batch} completions).",
        train.epochs.saturating_mul(mini_batches),
        train.epochs,
    )?;
    let every = |steps: Option<usize>| match steps {
        Some(steps) => format!("every {steps} steps"),
        None => "never".to_owned(),
    };
    let checkpoints = match run.checkpoint.every_steps {
        None => "after the last step".to_owned(),
        steps => every(steps),
    };
    writeln!(
        out,
        "Evaluation: {}. Checkpoints: {checkpoints}, in {}.",
        every(run.evaluation.every_steps),
        run.run_dir.display(),
    )?;
    Ok(())
}

/// The largest number of changed options that a summary lists.
const SHOWN_DIFFERENCES: usize = 6;

/// Prints the algorithm by name, and the options that differ from it.
fn print_algorithm(run: &RunConfig, out: &mut impl Write) -> Result<(), Exit> {
    let Algorithm {
        preset,
        differences,
    } = run.algorithm();
    let rate = run.train.optimizer.learning_rate;
    let all = if differences.is_empty() {
        "."
    } else {
        ". Changes to it:"
    };
    writeln!(out, "Algorithm: {preset}, with learning rate {rate:e}{all}")?;
    for difference in differences.iter().take(SHOWN_DIFFERENCES) {
        writeln!(out, "  {difference}")?;
    }
    if let Some(more @ 1..) = differences.len().checked_sub(SHOWN_DIFFERENCES) {
        writeln!(out, "  and {more} more (grpo check --all)")?;
    }
    Ok(())
}

/// Prints the step time, if the same directory already holds a run.
fn print_speed(run: &RunConfig, out: &mut impl Write) -> Result<(), Exit> {
    // Without a run there, the speed is not known.
    let Ok(before) = Run::read(&run.run_dir) else {
        return Ok(());
    };
    let times = before.step_seconds();
    if !times.is_empty() {
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        writeln!(
            out,
            "Speed: {mean:.1} s per step, the mean over {} steps in {}.",
            times.len(),
            run.run_dir.display()
        )?;
    }
    Ok(())
}

/// Checks a supervised run as [`check`] does, and shows which tokens in a row train.
fn check_sft(
    file: &Path,
    mut run: SftRunConfig,
    detail: Detail,
    ranks: Option<usize>,
) -> Result<(), Exit> {
    // The log has the warnings about the data.
    let console = Console::new(true);
    load::set_threads(&run)?;
    let content = HubContent::ModelWithoutWeights;
    load::files(&mut run, content, &BTreeMap::new(), &console)?;
    // A GGUF file has the tokenizer, without which there are no tokens to check.
    let inputs = if run.lacks_model_weights() && !run.model.path.is_dir() {
        None
    } else {
        Some(load::sft_inputs(&run)?)
    };
    console.finish();
    let settings = run
        .to_yaml()
        .map_err(|error| Exit::Config(error.to_string()))?;
    let mut text = Vec::new();
    match &inputs {
        Some((dataset, pretrained)) => print_rows(&run, dataset, pretrained, ranks, &mut text)?,
        None => writeln!(
            text,
            "The rows were not checked: the tokenizer is in the weight file, which is not downloaded yet."
        )?,
    }
    print_hub_files(&run, &mut text)?;
    detail.print(file, &text, &settings)
}

/// Prints which of its two frequency lists a [`RopeScaling::LongRope`] model uses. The longest row
/// in the run has `longest` tokens.
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
        let (list, relation) = if short_rows {
            ("short_factor", "at most")
        } else {
            ("long_factor", "more than")
        };
        let longest = match longest {
            usize::MAX => "a row with an environment may have".to_owned(),
            longest => format!("the longest row has {longest} tokens,"),
        };
        writeln!(
            out,
            "Rotary frequencies of {list}: {longest} {relation} original_max_position_embeddings, {original}.",
        )?;
    }
    Ok(())
}

/// Prints the row and token counts, the beginning of the first row, and the memory.
fn print_rows(
    run: &SftRunConfig,
    dataset: &SftDataset,
    pretrained: &Pretrained,
    ranks: Option<usize>,
    out: &mut impl Write,
) -> Result<(), Exit> {
    let rows = &dataset.train;
    let longest = dataset.longest_row();
    print_frequencies(&pretrained.model.clone().for_rows_of(longest), longest, out)?;
    let (_, steps) = run.sft.length(rows.examples.len());
    writeln!(
        out,
        "Data: {} training rows, {} held out. Steps: {steps}, each with {} rows.",
        rows.examples.len(),
        dataset.held_out.examples.len(),
        run.sft.batch_size,
    )?;
    writeln!(
        out,
        "Tokens: {}, {} of which train; the longest row has {}. Rows dropped as too long: {}; truncated: {}; with weight 0: {}.",
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
            "The first row begins like this, with ⟦ ⟧ around the tokens that train:"
        )?;
        for line in text.lines() {
            writeln!(out, "  {line}")?;
        }
    }
    let memory = sft_memory(run, &pretrained.model, dataset, ranks);
    let memory = memory.map_err(|error| Exit::Config(format!("{error:#}")))?;
    let size = format!("rows of up to {} tokens", rows.longest_kept());
    print_plan(&memory.plan, &size, out)?;
    if let Some(excess) = &memory.excess {
        writeln!(out, "  This is {excess}.")?;
    }
    print_shardings(&memory.of_ranks, out)
}

/// The largest number of tokens shown for a row.
const SHOWN_TOKENS: usize = 200;

/// A run's memory.
struct Memory {
    plan: MemoryPlan,
    /// The number of tokens in a micro-batch, if it is chosen by memory and the run fits.
    fitted_tokens: Option<usize>,
    /// The changes that the run needs to fit.
    advice: Option<String>,
    /// The plans of what several ranks can divide.
    of_ranks: RankPlans,
}

impl Memory {
    fn new(
        run: &RunConfig,
        model: &DecoderConfig,
        prompts: &RunPrompts,
        ranks: Option<usize>,
    ) -> anyhow::Result<Self> {
        let memory = RunMemory::new(run, model, prompts, ranks)?;
        let fitted_tokens = (run.train.fits_micro_batches())
            .then(|| memory.fitted_tokens())
            .transpose()?;
        let mut train = run.train.clone();
        if let Some(tokens) = fitted_tokens {
            train.micro_batch_tokens = Some(tokens.into());
        }
        let plan = memory.plan(&train)?;
        Ok(Self {
            advice: memory.advice(&plan),
            of_ranks: memory.plans_of_ranks(&train)?,
            plan,
            fitted_tokens,
        })
    }
}

/// Prints the CPU instructions that operators use, and advises against bf16 where they have none
/// for it.
fn print_instructions(dtype: ComputeDType, out: &mut impl Write) -> Result<(), Exit> {
    let selected = CpuInstructions::selected().map_err(|error| Exit::Config(error.to_string()))?;
    writeln!(out, "Operators on the CPU use the instructions {selected}.")?;
    if dtype == ComputeDType::Bf16 && selected < CpuInstructions::Avx512Bf16 {
        writeln!(
            out,
            "  These have none for bf16, so operators convert it to f32 first. On this CPU, `compute_dtype: f32` is faster."
        )?;
    }
    Ok(())
}

/// Prints the memory that each rank needs, for all that ranks can divide, and which to choose.
fn print_shardings(of_ranks: &RankPlans, out: &mut impl Write) -> Result<(), Exit> {
    if of_ranks.plans.is_empty() {
        return Ok(());
    }
    let plans = of_ranks.plans.iter();
    let plans = plans.map(|(sharding, plan)| format!("{} {}", Name(sharding), size(plan.peak())));
    let plans: Vec<String> = plans.collect();
    writeln!(out, "  On each rank, by sharding: {}.", plans.join(", "))?;
    if let Some(advice) = of_ranks.advice() {
        writeln!(out, "  Of these, {advice}.")?;
    }
    Ok(())
}

fn size(bytes: usize) -> String {
    match bytes >> 30 {
        0..10 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Prints the memory that the run needs for sequences with these lengths.
fn print_plan(plan: &MemoryPlan, lengths: &str, out: &mut impl Write) -> Result<(), Exit> {
    writeln!(
        out,
        "Memory: at most about {}, with {lengths}.",
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
        ("evaluation", plan.evaluation),
        ("weights to draw from", plan.held),
        ("packed weights", plan.packed),
        ("allocator", plan.allocator),
        ("program and tokenizer", plan.program),
    ];
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = parts
        .map(|(name, bytes)| format!("{name} {}", size(bytes)))
        .collect();
    writeln!(out, "  {}.", parts.join(", "))?;
    if plan.host > 0 {
        let host = size(plan.host);
        writeln!(out, "  Main memory holds {host} more.")?;
    }
    Ok(())
}

/// Prints the hub commits, and the weights to download.
fn print_hub_files(run: &impl Configuration, out: &mut impl Write) -> Result<(), Exit> {
    for (repository, commit) in run.hub_commits() {
        writeln!(out, "{repository}: commit {commit}.")?;
    }
    for (name, files) in run.missing_weights() {
        let bytes: u64 = files.iter().filter_map(|file| file.bytes).sum();
        let count = files.len();
        writeln!(
            out,
            "{name}: the weights are not in the cache and were not checked; {:.1} MB in {count} {} to download.",
            bytes as f64 / 1e6,
            if count == 1 { "file" } else { "files" }
        )?;
    }
    Ok(())
}

/// Prints what an imported file's sizes become here.
fn print_sizes(run: &RunConfig, out: &mut impl Write) -> Result<(), Exit> {
    writeln!(out, "Here: {}.", sizes(run))?;
    Ok(())
}

/// Returns a run's sizes.
pub(super) fn sizes(run: &RunConfig) -> Sizes {
    let train = &run.train;
    let sampled = train.prompts_per_step.saturating_mul(train.num_generations);
    let update = train.mini_batch_size.unwrap_or(sampled).min(sampled);
    let updates = train.epochs as f64 * sampled.div_ceil(update.max(1)) as f64;
    Sizes {
        sampled: sampled as f64,
        update: update as f64,
        updates,
        all_updates: Some(run.max_steps as f64 * updates),
    }
}
