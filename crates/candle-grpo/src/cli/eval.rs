//! `grpo eval`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_grpo::nn::RopeScaling;
use candle_grpo::run::{RunPrompts, clock_of_run, engine, evaluate_policy, prompts, trajectories};
use candle_grpo::train::hub::HubContent;
use candle_grpo::train::run::Evaluation;
use candle_grpo::train::{Interrupted, RewardFunction, RunDir};
use serde_json::Value;

use super::console::Console;
use super::exit::Exit;
use super::suites::SuiteArguments;
use super::{load, output, suites};

#[derive(clap::Args)]
pub(super) struct EvalArguments {
    /// The configuration, with its data, rewards and evaluation section. With --suite, the model.
    #[arg(value_name = "FILE_OR_MODEL", required_unless_present = "compare")]
    file: Option<PathBuf>,
    /// Evaluate this model instead of the configuration's: a directory, a GGUF file, a run
    /// directory (its best checkpoint), or a Hugging Face hub name. For a trained model, pass
    /// `--model RUN`; without it, the model before training is evaluated.
    #[arg(long)]
    model: Option<PathBuf>,
    #[command(flatten)]
    suites: SuiteArguments,
    /// Write the answers to this file as JSON lines. With --suite or --compare: a directory for
    /// the table as JSON, and one JSON lines file per suite.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace an --out file that this command did not write, unless this command or the run reads
    /// it.
    #[arg(long, requires = "out")]
    force: bool,
    /// Only log warnings, and show no progress.
    #[arg(short, long)]
    quiet: bool,
}

/// Evaluates a configuration's held-out prompts or suites, or compares two results.
pub(super) fn run(arguments: EvalArguments) -> Result<(), Exit> {
    let EvalArguments {
        file,
        model,
        suites,
        out,
        force,
        quiet,
    } = arguments;
    let out = out.as_deref();
    suites.check()?;
    match (file, suites.compare.as_deref()) {
        (_, Some([a, b])) => suites::compare_two(a, b, &suites, out, force, quiet),
        (Some(file), _) if suites.suite.is_empty() => eval(&file, model, out, force, quiet),
        (Some(file), _) => suites::eval(&file, &suites, out, force, quiet),
        (None, _) => Err(Exit::Config(
            "pass a configuration, or a model with --suite".to_owned(),
        )),
    }
}

/// Evaluates `model`, or the model that `file` configures, on the held-out prompts, and prints the
/// metrics.
fn eval(
    file: &Path,
    model: Option<PathBuf>,
    out: Option<&Path>,
    force: bool,
    quiet: bool,
) -> Result<(), Exit> {
    // An evaluation does not train.
    let mut run = load::any_config(file, true)?;
    run.check_local_sampler().map_err(load::wrong)?;
    if let Some(path) = model {
        run.model.path = path;
    }
    let console = Console::new(quiet);
    console.stop_when_asked();
    load::files(&mut run, HubContent::Model, &BTreeMap::new(), &console)?;
    if let Some(out) = out {
        let mut inputs = run.inputs();
        inputs.extend([file.to_path_buf(), run.run_dir.clone()]);
        output::check(out, force, &inputs, is_answer)?;
    }
    // Prompts are those of the run.
    let clock = clock_of_run(&run.run_dir).map_err(|error| Exit::Run(format!("{error:#}")))?;
    run.model.clock = clock;
    load::set_threads(&run)?;
    let dataset = run.load_data().map_err(Exit::from_data)?;
    if dataset.held_out.is_empty() {
        return Err(Exit::Config(format!(
            "{}: no held-out prompts, set data.held_out or data.held_out_rows",
            file.display()
        )));
    }
    let mut pretrained = load::model(&run.model)?;
    let template = run.chat_template(&pretrained);
    pretrained.chat_template = template.map_err(|error| Exit::Config(error.to_string()))?;
    let held_out =
        prompts(&run, &dataset, &dataset.held_out, &pretrained).map_err(Exit::from_data)?;
    run.check_evaluation(&pretrained.model, &held_out)
        .map_err(|error| Exit::Config(error.to_string()))?;
    if matches!(pretrained.model.rope_scaling, RopeScaling::LongRope { .. }) {
        // The frequencies are those of the run, which also has the rows to train on.
        let all = RunPrompts::new(&run, &dataset, &pretrained).map_err(Exit::from_data)?;
        pretrained.model = pretrained.model.for_rows_of(all.longest_row(&run));
    }
    let mut reward = load::rewards(&run)?;
    let config = &run.evaluation;
    let progress = Arc::new(console.clone());
    reward.set_progress(progress.clone());
    let answer = || -> anyhow::Result<(Evaluation, BTreeMap<String, f64>)> {
        let dtype = run.train.rollout_dtype();
        let sampler = load::sampler(&pretrained, config.sampler.clone(), dtype, &console)?;
        // A server with a fixed policy is evaluated itself. Another one would have to receive the
        // weights first.
        let generator = if run.train.rollout.is_fixed_policy() {
            engine(
                &run.train,
                sampler.config(),
                &pretrained,
                &RunDir::engine_weights(&run.run_dir),
                &[],
                false,
            )?
        } else {
            None
        };
        let mut sampler = match generator {
            Some(generator) => sampler.with_generator(generator),
            None => sampler,
        };
        if let Some(environment) = &run.environment {
            let stop_token_ids = sampler.config().stop_token_ids.clone();
            let environments = trajectories(environment, &pretrained, &stop_token_ids)?;
            sampler = sampler.with_environments(environments);
        }
        let tokenizer = &pretrained.tokenizer;
        let evaluation =
            evaluate_policy(&sampler, &held_out, &reward, tokenizer, config, &*progress)?;
        reward.finish()?;
        let metrics = evaluation.metrics(&config.pass_at, config.pass_reward)?;
        Ok((evaluation, metrics))
    };
    let answered = answer();
    console.finish();
    let (evaluation, metrics) = answered.map_err(|error| {
        if error.is::<Interrupted>() {
            Exit::Interrupted("Nothing was written.".to_owned())
        } else {
            Exit::Run(format!("{error:#}"))
        }
    })?;
    console.print(&format!("{:20} {}", "answers", evaluation.samples.len()))?;
    for (name, value) in metrics {
        console.print(&format!("{name:20} {value:.4}"))?;
    }
    match out {
        Some(out) => write_answers(&evaluation, out),
        None => Ok(()),
    }
}

/// Writes a JSON line per answer.
fn write_answers(evaluation: &Evaluation, out: &Path) -> Result<(), Exit> {
    let mut text = Vec::new();
    for sample in &evaluation.samples {
        let line = serde_json::to_string(sample).map_err(|error| Exit::Run(error.to_string()))?;
        text.extend_from_slice(line.as_bytes());
        text.push(b'\n');
    }
    output::write(out, &text)
}

/// Returns whether [`write_answers`] could have written this line. A run's lines also have a step.
fn is_answer(line: &str) -> bool {
    let Ok(Value::Object(line)) = serde_json::from_str(line) else {
        return false;
    };
    let has = |key: &str| line.contains_key(key);
    has("prompt") && has("completion") && has("finish_reason") && !has("step")
}
