//! Bounds on sizes in a configuration, from the memory that they need.

use candle_grpo_nn::{DecoderConfig, LoraConfig};
use serde_json::Value;

use super::EvaluationConfig;
use super::document::join;
use super::problem::{Problem, within};
use super::run::RunConfig;
use super::sft::SftRunConfig;

/// The largest count that any key accepts.
const COUNT: u64 = 1 << 40;
/// The most completions in a step or an evaluation.
const COMPLETIONS: usize = 1 << 20;
/// The largest number of bytes for a step's tokens.
const STEP_BYTES: u128 = 1 << 40;
/// In a step, about ten tensors hold four bytes per token.
const TOKEN_BYTES: u128 = 40;
/// The bytes per adapted weight: itself, its gradient and two moments.
const ADAPTER_BYTES: u128 = 16;
/// The largest adapter rank for any model.
const RANK: usize = 1 << 16;
/// The largest number of threads, which need a stack of 2 MiB each.
const THREADS: usize = 1 << 10;
const STACK_BYTES: u128 = 2 << 20;

/// Rejects sizes that no machine could start with.
pub(super) fn check(run: &RunConfig) -> Result<(), Problem> {
    positive(&[
        ("max_steps", Some(run.max_steps)),
        ("threads", run.threads),
        ("max_memory_mib", run.max_memory_mib),
        ("checkpoint.every_steps", run.checkpoint.every_steps),
        ("checkpoint.keep", Some(run.checkpoint.keep)),
        ("evaluation.every_steps", run.evaluation.every_steps),
        ("evaluation.max_prompts", run.evaluation.max_prompts),
        ("max_prompt_tokens", Some(run.max_prompt_tokens)),
    ])?;
    check_threads(run.threads)?;
    check_rank("", run.train.adapters.as_ref())?;
    step(run)?;
    check_evaluation(&run.evaluation, 1)?;
    let effective = run.to_value().map_err(|error| Problem::at("", error))?;
    numbers("", &effective)
}

/// Rejects counts of 0.
pub(super) fn positive(counts: &[(&str, Option<usize>)]) -> Result<(), Problem> {
    match counts.iter().find(|(_, count)| *count == Some(0)) {
        Some((key, _)) => Err(Problem::at(key, "0, must be at least 1")),
        None => Ok(()),
    }
}

/// Rejects thread counts that no machine could start.
fn check_threads(threads: Option<usize>) -> Result<(), Problem> {
    if let Some(threads) = threads.filter(|&threads| threads > THREADS) {
        let stacks = size(threads as u128 * STACK_BYTES);
        return Err(Problem::at(
            "threads",
            format!("{threads}, must be at most {THREADS}; their stacks take {stacks}"),
        ));
    }
    Ok(())
}

/// Rejects adapter ranks that no machine could hold for any model.
fn check_rank(section: &str, adapters: Option<&LoraConfig>) -> Result<(), Problem> {
    if let Some(adapters) = adapters
        && !(1..=RANK).contains(&adapters.rank)
    {
        let key = join(section, "adapters.rank");
        let message = format!("{}, must be from 1 to {RANK}", adapters.rank);
        let takes = match adapters.rank {
            0 => String::new(),
            rank => format!(
                "; the adapter of one map of 1024 inputs and outputs takes {}",
                size(rank as u128 * 2 * 1024 * ADAPTER_BYTES)
            ),
        };
        return Err(Problem::at(&key, message + &takes));
    }
    Ok(())
}

/// [`check`] for supervised training.
pub(super) fn check_sft(run: &SftRunConfig) -> Result<(), Problem> {
    positive(&[
        ("max_steps", run.sft.max_steps),
        ("threads", run.threads),
        ("checkpoint.every_steps", run.checkpoint.every_steps),
        ("checkpoint.keep", Some(run.checkpoint.keep)),
        ("evaluation.every_steps", run.evaluation.every_steps),
        ("evaluation.max_rows", run.evaluation.max_rows),
    ])?;
    check_threads(run.threads)?;
    check_rank("sft", run.sft.adapters.as_ref())?;
    let effective = run.to_value().map_err(|error| Problem::at("", error))?;
    numbers("", &effective)
}

/// Rejects invalid adapters for `model` in `section`, and adapters wider than the model, since a
/// smaller rank gives the same updates.
pub(super) fn check_adapters(
    section: &str,
    adapters: &LoraConfig,
    model: &DecoderConfig,
) -> Result<(), Problem> {
    let section = join(section, "adapters");
    let shapes = within(&section, adapters.parameter_shapes(model))?;
    let width = model.hidden_size;
    if adapters.rank > width {
        let weights: u128 = shapes
            .values()
            .map(|shape| shape.elem_count() as u128)
            .sum();
        return Err(Problem::at(
            &format!("{section}.rank"),
            format!(
                "{}, must be at most {width}, the width of the model; the adapters take {}",
                adapters.rank,
                size(weights * ADAPTER_BYTES)
            ),
        ));
    }
    Ok(())
}

/// Rejects evaluations on `prompts` held-out prompts that no machine could hold.
pub(super) fn check_evaluation(config: &EvaluationConfig, prompts: usize) -> Result<(), Problem> {
    let prompts = config.max_prompts.unwrap_or(usize::MAX).min(prompts);
    let samples = config.samples_per_prompt;
    let completions = (prompts as u128).saturating_mul(samples as u128);
    let length = config.sampler.max_new_tokens as u128;
    let bytes = completions
        .saturating_mul(length)
        .saturating_mul(TOKEN_BYTES);
    let takes = format!(
        "{samples} completions of up to {length} tokens for each of {prompts} prompts take {}",
        size(bytes)
    );
    if completions > COMPLETIONS as u128 {
        return Err(Problem::at(
            "evaluation.samples_per_prompt",
            format!("{samples}, must make at most {COMPLETIONS} completions; {takes}"),
        ));
    }
    if bytes > STEP_BYTES {
        return Err(Problem::at(
            "evaluation.sampler.max_new_tokens",
            format!("{length}, must take at most {}; {takes}", size(STEP_BYTES)),
        ));
    }
    Ok(())
}

/// Rejects steps that no machine could hold.
fn step(run: &RunConfig) -> Result<(), Problem> {
    let train = &run.train;
    let (prompts, group) = (train.prompts_per_step, train.num_generations);
    let completions = (prompts as u128).saturating_mul(group as u128);
    let length = train.sampling.max_new_tokens as u128;
    let bytes = completions
        .saturating_mul(length)
        .saturating_mul(TOKEN_BYTES);
    let takes = format!(
        "{completions} completions of up to {length} tokens take {} a step",
        size(bytes)
    );
    let (key, value) = if prompts >= group {
        ("prompts_per_step", prompts)
    } else {
        ("num_generations", group)
    };
    if completions > COMPLETIONS as u128 {
        return Err(Problem::at(
            key,
            format!("{value}, must make at most {COMPLETIONS} completions a step; {takes}"),
        ));
    }
    if bytes > STEP_BYTES {
        return Err(Problem::at(
            "sampling.max_new_tokens",
            format!(
                "{length}, must take at most {} a step; {takes}",
                size(STEP_BYTES)
            ),
        ));
    }
    let batches = match train.recipe.group_filter {
        Some(_) => train.max_sampling_batches as u128,
        None => 1,
    };
    let all = bytes.saturating_mul(batches);
    if all > STEP_BYTES {
        return Err(Problem::at(
            "max_sampling_batches",
            format!(
                "{batches}, must take at most {} a step; {batches} batches take {}",
                size(STEP_BYTES),
                size(all)
            ),
        ));
    }
    Ok(())
}

/// Keys without a bound, because their values need no memory: seeds, budgets, and JSON requests,
/// schemas and chat templates.
const UNBOUNDED: [&str; 6] = [
    "seed",
    "max_requests",
    "max_tokens_total",
    "extra_body",
    "parameters",
    "chat_template_kwargs",
];

/// Rejects integers above [`COUNT`] and numbers outside the f32 range, except for [`UNBOUNDED`]
/// keys.
fn numbers(path: &str, value: &Value) -> Result<(), Problem> {
    let key = path.rsplit('.').next().unwrap_or(path);
    match value {
        _ if UNBOUNDED.contains(&key) => Ok(()),
        Value::Number(number) => {
            let is_count = number.is_u64() || number.is_i64();
            let bound = if is_count {
                COUNT as f64
            } else {
                f64::from(f32::MAX)
            };
            match number.as_f64() {
                Some(x) if x.abs() <= bound => Ok(()),
                Some(x) if is_count => Err(Problem::at(
                    path,
                    format!(
                        "{number}, must be at most {bound}; with one byte each they take {}",
                        size(x.abs() as u128)
                    ),
                )),
                _ => Err(Problem::at(
                    path,
                    format!("{number}, must be at most {bound}, the greatest f32"),
                )),
            }
        }
        Value::Object(map) => {
            let mut keys = map.iter();
            keys.try_for_each(|(key, value)| numbers(&join(path, key), value))
        }
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(i, value)| numbers(&format!("{path}[{i}]"), value))
        }
        _ => Ok(()),
    }
}

/// Returns a byte count in a suitable unit.
fn size(bytes: u128) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10).min(6);
    let count = bytes as f64 / 2f64.powi(10 * power as i32);
    format!("{count:.0} {}", units[power as usize])
}
