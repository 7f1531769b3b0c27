//! `grpo eval` with suites, and comparisons.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_grpo::config::{EvaluationConfig, ModelConfig, SuiteConfig};
use candle_grpo::run::{device, locate};
use candle_grpo::suite::{
    PromptResult, SuiteComparison, SuitePrompts, SuiteSummary, compare, evaluate_suite, read_rows,
};
use candle_grpo::train::data::{Row, read_json, read_json_lines};
use candle_grpo::train::hub::{HubContent, HubName};
use candle_grpo::train::{
    ComputeDType, Interrupted, Pretrained, Prompt, RewardConfig, RewardFunction, SamplingConfig,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

use super::console::Console;
use super::exit::{Exit, warn};
use super::sample::{Distribution, object};
use super::table::Table;
use super::{load, output};

/// A model's summary, in a results directory.
const SUMMARY: &str = "summary.json";
const COMPARISON: &str = "comparison.json";

// The options of suites. A doc comment would become the description of the command.
#[derive(clap::Args)]
pub(super) struct SuiteArguments {
    /// Prompt suites, separated by commas: gsm8k, svamp, math500, aime24, aime25, mmlu, mmlu_pro,
    /// gpqa_diamond, ifeval, humaneval, humaneval_plus, mbpp_plus, or a file path
    /// (docs/evaluation.md). The first argument is then a model: a directory, a GGUF file, a
    /// run directory (its best checkpoint), or a Hugging Face hub name.
    #[arg(
        long,
        value_name = "SUITE",
        value_delimiter = ',',
        conflicts_with = "model"
    )]
    pub(super) suite: Vec<String>,
    /// The directory with the suite files, such as gsm8k/test.jsonl. Default: the hub, or the
    /// working directory for suites that name no hub file.
    #[arg(long, value_name = "DIRECTORY", requires = "suite")]
    data: Option<PathBuf>,
    /// The number of answers per prompt. Default: set by the suite.
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        requires = "suite",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    samples: Option<u32>,
    /// The values k for pass@k and maj@k, separated by commas. Default: 1 and the number of
    /// answers.
    #[arg(long, value_name = "K", value_delimiter = ',', requires = "suite")]
    pass_at: Option<Vec<usize>>,
    /// Use only the first N prompts in each suite. Default: all.
    #[arg(long, value_name = "N", requires = "suite", value_parser = clap::value_parser!(u32).range(1..))]
    max_prompts: Option<u32>,
    /// The maximum answer length in tokens. Default: set by the suite.
    #[arg(long, value_name = "N", requires = "suite", value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: Option<u32>,
    #[command(flatten)]
    distribution: Distribution,
    /// Chat template variables as a JSON object, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = object, requires = "suite")]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The random seed. Default: 0.
    #[arg(long, requires = "suite")]
    seed: Option<u64>,
    /// Compare two results on the same prompts: --out directories, their JSON lines files, or two
    /// models with --suite.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["file", "model"])]
    pub(super) compare: Option<Vec<PathBuf>>,
}

impl SuiteArguments {
    /// Rejects answer options if no suite is answered.
    pub(super) fn check(&self) -> Result<(), Exit> {
        if self.suite.is_empty() && self.distribution.is_given() {
            Err(Exit::Config(
                "--temperature, --top-k, --top-p and --min-p: must be absent without --suite"
                    .to_owned(),
            ))
        } else {
            Ok(())
        }
    }
}

/// A model's summary on several suites.
#[derive(Serialize, Deserialize)]
struct Summary {
    model: PathBuf,
    suites: Vec<SuiteSummary>,
}

/// A suite with its rows.
struct LoadedSuite {
    config: SuiteConfig,
    rows: Vec<Row>,
}

/// A model's results.
struct Results {
    model: PathBuf,
    suites: Vec<(SuiteSummary, Vec<PromptResult>)>,
}

/// Evaluates a model on suites, and prints a table.
pub(super) fn eval(
    model: &Path,
    arguments: &SuiteArguments,
    out: Option<&Path>,
    force: bool,
    quiet: bool,
) -> Result<(), Exit> {
    let console = Console::new(quiet);
    console.stop_when_asked();
    let suites = suites(arguments, &console)?;
    if let Some(out) = out {
        check_folder(out, &suites, force, &inputs(&suites, model))?;
    }
    let results = answer(model, &suites, arguments, &console)?;
    print(&results, &console)?;
    match out {
        Some(out) => write(&results, out),
        None => Ok(()),
    }
}

/// Compares two results or two models, and prints a table.
pub(super) fn compare_two(
    a: &Path,
    b: &Path,
    arguments: &SuiteArguments,
    out: Option<&Path>,
    force: bool,
    quiet: bool,
) -> Result<(), Exit> {
    let console = Console::new(quiet);
    console.stop_when_asked();
    for path in [a, b] {
        if !is_result(path) && arguments.suite.is_empty() {
            return Err(Exit::Config(format!(
                "--compare: {}: neither a directory with {SUMMARY} nor a JSON lines file; a model needs --suite",
                path.display()
            )));
        }
    }
    let suites = suites(arguments, &console)?;
    let folder = |name: &str| out.map(|out| out.join(name));
    if let Some(out) = out {
        let mut all = inputs(&suites, a);
        all.push(b.to_path_buf());
        check_is_folder(out)?;
        output::check(&out.join(COMPARISON), force, &all, is_comparison)?;
        for (path, name) in [(a, "a"), (b, "b")] {
            if !is_result(path) {
                check_folder(&out.join(name), &suites, force, &all)?;
            }
        }
    }
    let results = |path: &Path, name: &str| -> Result<Answered, Exit> {
        if is_result(path) {
            return read(path, &arguments.suite);
        }
        let results = answer(path, &suites, arguments, &console)?;
        print(&results, &console)?;
        if let Some(folder) = folder(name) {
            write(&results, &folder)?;
        }
        let (summaries, results): (Vec<_>, Vec<_>) = results.suites.into_iter().unzip();
        Ok(Answered {
            summaries,
            results: results.concat(),
        })
    };
    let (of_a, of_b) = (results(a, "a")?, results(b, "b")?);
    let comparisons = compare(&of_a.results, &of_b.results)
        .map_err(|error| Exit::Data(format!("--compare: {error:#}")))?;
    print_comparison(a, b, &comparisons, &console)?;
    warn_of_differences(&of_a.summaries, &of_b.summaries)?;
    let Some(out) = out else { return Ok(()) };
    create_folder(out)?;
    let value = serde_json::json!({"a": a, "b": b, "suites": comparisons});
    output::write(&out.join(COMPARISON), &pretty(&value)?)
}

/// The results on one side of a comparison.
struct Answered {
    /// Their summaries; empty for a JSON lines file.
    summaries: Vec<SuiteSummary>,
    results: Vec<PromptResult>,
}

/// Warns about suites that the two sides answered with different settings.
fn warn_of_differences(a: &[SuiteSummary], b: &[SuiteSummary]) -> Result<(), Exit> {
    let settings = |summary: &SuiteSummary| -> Result<Map<String, Value>, Exit> {
        let sampler = serde_json::to_value(&summary.sampler);
        let mut settings = match sampler.map_err(|error| Exit::Run(error.to_string()))? {
            Value::Object(sampler) => sampler,
            _ => Map::new(),
        };
        // These do not change the distribution of a completion.
        for key in ["seed", "max_batch_size", "max_cache_mib", "stop_token_ids"] {
            settings.remove(key);
        }
        settings.insert("pass_reward".to_owned(), summary.pass_reward.into());
        Ok(settings)
    };
    for of_a in a {
        let Some(of_b) = b.iter().find(|of_b| of_b.suite == of_a.suite) else {
            continue;
        };
        let (before, now) = (settings(of_a)?, settings(of_b)?);
        let differences = before.iter().filter_map(|(key, value)| {
            let other = now.get(key).unwrap_or(&Value::Null);
            (other != value).then(|| format!("{key} {value} and {other}"))
        });
        let differences: Vec<String> = differences.collect();
        if !differences.is_empty() {
            warn(&format!(
                "suite {}: A and B have different settings: {}",
                of_a.suite,
                differences.join(", ")
            ));
        }
    }
    Ok(())
}

/// Reads the suites on the command line and their rows.
fn suites(arguments: &SuiteArguments, console: &Console) -> Result<Vec<LoadedSuite>, Exit> {
    let wrong = |message: String| Exit::Config(message);
    let mut names = BTreeSet::new();
    let mut suites = Vec::new();
    for name in &arguments.suite {
        let mut config = SuiteConfig::find(name).map_err(|error| wrong(error.to_string()))?;
        if !names.insert(config.name.clone()) {
            return Err(wrong(format!("--suite: {} is given twice", config.name)));
        }
        let evaluation = &mut config.evaluation;
        if let Some(samples) = arguments.samples {
            evaluation.samples_per_prompt = samples as usize;
        }
        let samples = evaluation.samples_per_prompt;
        evaluation.pass_at = arguments
            .pass_at
            .clone()
            .unwrap_or_else(|| vec![1, samples]);
        evaluation.pass_at.dedup();
        if let Some(k) = evaluation
            .pass_at
            .iter()
            .find(|k| !(1..=samples).contains(k))
        {
            return Err(wrong(format!(
                "--pass-at: {k}, must be from 1 to the {samples} answers to each prompt of {}",
                config.name
            )));
        }
        if let Some(prompts) = arguments.max_prompts {
            evaluation.max_prompts = Some(prompts as usize);
        }
        let sampler = &mut evaluation.sampler;
        if let Some(length) = arguments.max_new_tokens {
            sampler.max_new_tokens = length as usize;
        }
        if let Some(seed) = arguments.seed {
            sampler.seed = seed;
        }
        config
            .check_files()
            .map_err(|error| wrong(error.to_string()))?;
        let locate = |path: &Path| locate_data(path, console);
        let rows = read_rows(&config, arguments.data.as_deref(), locate);
        console.finish();
        let rows = rows.map_err(Exit::from_suite)?;
        suites.push(LoadedSuite { config, rows });
    }
    Ok(suites)
}

/// Returns the path to a data file, which may be a hub name.
fn locate_data(path: &Path, console: &Console) -> anyhow::Result<PathBuf> {
    match HubName::of_prefixed(path)? {
        Some(name) => Ok(locate(&name, HubContent::Data, None, console)?.path),
        None => Ok(path.to_path_buf()),
    }
}

/// Answers the suites' prompts with the model at `path`.
fn answer(
    path: &Path,
    suites: &[LoadedSuite],
    arguments: &SuiteArguments,
    console: &Console,
) -> Result<Results, Exit> {
    let mut pretrained = load::model(&ModelConfig {
        path: load::model_file(path, console)?,
        ..ModelConfig::default()
    })?;
    if let Some(variables) = &arguments.chat_template_kwargs {
        load::set_variables(&mut pretrained, variables)?;
    }
    let mut answered = Vec::new();
    for suite in suites {
        let config = evaluation(suite, arguments, &pretrained)?;
        let prompts = SuitePrompts::new(&suite.config, &suite.rows, &pretrained);
        let prompts = prompts.map_err(Exit::from_data)?;
        check_length(&suite.config.name, &config, &prompts, &pretrained)?;
        let results = answer_suite(suite, &prompts, &config, &mut pretrained, console);
        console.finish();
        answered.push(results.map_err(|error| {
            if error.is::<Interrupted>() {
                Exit::Interrupted("Nothing was written.".to_owned())
            } else {
                Exit::Run(format!("suite {}: {error:#}", suite.config.name))
            }
        })?);
    }
    Ok(Results {
        model: path.to_path_buf(),
        suites: answered,
    })
}

/// Returns a suite's evaluation, whose distribution comes from the command line, the suite or the
/// model.
fn evaluation(
    suite: &LoadedSuite,
    arguments: &SuiteArguments,
    pretrained: &Pretrained,
) -> Result<EvaluationConfig, Exit> {
    let mut config = suite.config.evaluation.clone();
    let several = config.samples_per_prompt > 1;
    let distribution = &arguments.distribution;
    let sampler = config.sampler;
    config.sampler = if suite.config.has_distribution {
        distribution.apply(sampler, several)?
    } else {
        distribution.of_model(pretrained, sampler, several)?
    };
    if several && config.sampler.greedy {
        return Err(Exit::Config(format!(
            "--temperature: 0, must be above 0 with {} answers to each prompt, which would be equal",
            config.samples_per_prompt
        )));
    }
    Ok(config)
}

/// Rejects answers longer than the model's positions.
fn check_length(
    suite: &str,
    config: &EvaluationConfig,
    prompts: &SuitePrompts,
    pretrained: &Pretrained,
) -> Result<(), Exit> {
    let longest = Prompt::longest(&prompts.prompts);
    let (length, positions) = (
        config.sampler.max_new_tokens,
        pretrained.model.max_position_embeddings,
    );
    if length.saturating_add(longest) <= positions {
        return Ok(());
    }
    Err(Exit::Config(format!(
        "--max-new-tokens: {length}, must be at most {} for the suite {suite}: the model has {positions} positions, and the longest prompt has {longest} tokens",
        positions.saturating_sub(longest)
    )))
}

fn answer_suite(
    suite: &LoadedSuite,
    prompts: &SuitePrompts,
    config: &EvaluationConfig,
    pretrained: &mut Pretrained,
    console: &Console,
) -> anyhow::Result<(SuiteSummary, Vec<PromptResult>)> {
    let mut reward = RewardConfig::build(&suite.config.rewards, &device()?)?;
    reward.set_progress(Arc::new(console.clone()));
    let sampler: SamplingConfig = config.sampler.clone();
    let row = Prompt::longest(&prompts.prompts).saturating_add(sampler.max_new_tokens);
    pretrained.model = pretrained.model.clone().for_rows_of(row);
    let sampler = load::sampler(pretrained, sampler, ComputeDType::F32, console)?;
    let (results, has_votes) = evaluate_suite(
        &suite.config,
        prompts,
        &sampler,
        &reward,
        &pretrained.tokenizer,
        config,
        console,
    )?;
    reward.finish()?;
    // The sampler has the stop tokens of the model.
    let config = EvaluationConfig {
        sampler: sampler.config().clone(),
        ..config.clone()
    };
    let summary = SuiteSummary::new(&suite.config, &results, has_votes, &config)?;
    Ok((summary, results))
}

/// Prints each suite's metrics.
fn print(results: &Results, console: &Console) -> Result<(), Exit> {
    let summaries = || results.suites.iter().map(|(summary, _)| summary);
    // pass@k before maj@k, each in the order of k.
    let order = |name: &str| -> (bool, usize) {
        let (kind, k) = name.split_once('@').unwrap_or((name, ""));
        (kind != "pass", k.parse().unwrap_or(0))
    };
    let mut names: Vec<&String> = summaries()
        .flat_map(|summary| summary.metrics.keys())
        .collect();
    names.sort_by_key(|name| order(name));
    names.dedup();
    let mut header = vec![
        "suite".to_owned(),
        "prompts".to_owned(),
        "answers".to_owned(),
    ];
    header.extend(names.iter().map(|name| format!("{name} [95%]")));
    header.extend(["tokens".to_owned(), "truncated".to_owned()]);
    let mut table = Table::new(header);
    for summary in summaries() {
        let mut row = vec![
            summary.suite.clone(),
            summary.prompts.to_string(),
            (summary.prompts * summary.samples_per_prompt).to_string(),
        ];
        row.extend(names.iter().map(|name| {
            let Some(estimate) = summary.metrics.get(*name) else {
                return "-".to_owned();
            };
            match (estimate.low, estimate.high) {
                (Some(low), Some(high)) => {
                    format!("{:.4} [{low:.4}, {high:.4}]", estimate.value)
                }
                _ => format!("{:.4}", estimate.value),
            }
        }));
        row.push(format!("{:.1}", summary.response_length));
        row.push(format!("{:.1} %", 100. * summary.truncated));
        table.push(row);
    }
    console.print(&format!("model {}", results.model.display()))?;
    console.print(&table.to_string())?;
    for summary in summaries().filter(|summary| summary.rewards_missing > 0) {
        warn(&format!(
            "suite {}: {} answers have no reward and do not pass",
            summary.suite, summary.rewards_missing
        ));
    }
    Ok(())
}

/// Prints the difference between two results on each suite.
fn print_comparison(
    a: &Path,
    b: &Path,
    comparisons: &[SuiteComparison],
    console: &Console,
) -> Result<(), Exit> {
    let header = [
        "suite",
        "prompts",
        "A",
        "B",
        "B - A [95%]",
        "A better",
        "B better",
        "p",
        "test",
    ];
    let mut table = Table::new(header.map(str::to_owned).to_vec());
    for of_suite in comparisons {
        let c = &of_suite.comparison;
        let interval = match (c.low, c.high) {
            (Some(low), Some(high)) => format!(" [{low:+.4}, {high:+.4}]"),
            _ => String::new(),
        };
        let test = serde_json::to_value(c.test).map_err(|error| Exit::Run(error.to_string()))?;
        table.push(vec![
            of_suite.suite.clone(),
            c.prompts.to_string(),
            format!("{:.4}", c.a),
            format!("{:.4}", c.b),
            format!("{:+.4}{interval}", c.difference),
            c.a_better.to_string(),
            c.b_better.to_string(),
            c.p_value.map_or("-".to_owned(), |p| {
                if p < 1e-4 {
                    format!("{p:.1e}")
                } else {
                    format!("{p:.4}")
                }
            }),
            test.as_str().unwrap_or_default().to_owned(),
        ]);
    }
    console.print(&format!("A {}\nB {}", a.display(), b.display()))?;
    console.print(&table.to_string())?;
    for of_suite in comparisons {
        if of_suite.only_a + of_suite.only_b > 0 {
            warn(&format!(
                "suite {}: {} prompts in A and {} in B have no pair and are not compared",
                of_suite.suite, of_suite.only_a, of_suite.only_b
            ));
        }
        let pairs = of_suite.comparison.prompts;
        for (count, what) in [
            (of_suite.other_prompts, "prompt texts"),
            (of_suite.other_counts, "answer counts"),
        ] {
            if count > 0 {
                warn(&format!(
                    "suite {}: {count} of {pairs} pairs have different {what} in A and B",
                    of_suite.suite
                ));
            }
        }
    }
    Ok(())
}

/// Returns whether a path holds results and no model.
fn is_result(path: &Path) -> bool {
    let is_lines = path.extension().is_some_and(|end| end == "jsonl");
    is_lines || path.join(SUMMARY).is_file()
}

/// Reads the results for `suites`, or all results if there are none.
fn read(path: &Path, suites: &[String]) -> Result<Answered, Exit> {
    let wrong = |error: anyhow::Error| Exit::Data(format!("{error:#}"));
    let mut summaries = Vec::new();
    let files = if path.is_dir() {
        let summary: Summary = read_json(&path.join(SUMMARY)).map_err(wrong)?;
        summaries = summary.suites;
        let names = summaries.iter();
        names
            .map(|summary| lines_of(path, &summary.suite))
            .collect()
    } else {
        vec![path.to_path_buf()]
    };
    let mut results = Vec::new();
    for file in files {
        if !file.is_file() {
            return Err(Exit::Data(format!("{}: is missing", file.display())));
        }
        results.extend(read_json_lines::<PromptResult>(&file).map_err(wrong)?);
    }
    if !suites.is_empty() {
        results.retain(|result| suites.contains(&result.suite));
        summaries.retain(|summary| suites.contains(&summary.suite));
    }
    Ok(Answered { summaries, results })
}

/// Returns the paths that the command reads.
fn inputs(suites: &[LoadedSuite], model: &Path) -> Vec<PathBuf> {
    let rows = suites.iter().flat_map(|suite| suite.rows.first());
    let files = rows.map(|row| row.file.to_path_buf());
    let rewards = suites.iter().flat_map(|suite| &suite.config.rewards);
    let rewards = rewards.flat_map(RewardConfig::files);
    files.chain(rewards).chain([model.to_path_buf()]).collect()
}

fn lines_of(folder: &Path, suite: &str) -> PathBuf {
    folder.join(format!("{suite}.jsonl"))
}

/// Rejects a directory with files that are not this command's results.
fn check_folder(
    folder: &Path,
    suites: &[LoadedSuite],
    force: bool,
    inputs: &[PathBuf],
) -> Result<(), Exit> {
    check_is_folder(folder)?;
    output::check(&folder.join(SUMMARY), force, inputs, is_summary)?;
    for suite in suites {
        let lines = lines_of(folder, &suite.config.name);
        output::check(&lines, force, inputs, is_result_line)?;
    }
    Ok(())
}

fn check_is_folder(folder: &Path) -> Result<(), Exit> {
    if folder.exists() && !folder.is_dir() {
        Err(Exit::Config(format!(
            "{}: is not a directory, must be one",
            folder.display()
        )))
    } else {
        Ok(())
    }
}

/// Writes each prompt's results, then the summary.
fn write(results: &Results, folder: &Path) -> Result<(), Exit> {
    create_folder(folder)?;
    for (summary, results) in &results.suites {
        let mut text = Vec::new();
        for result in results {
            serde_json::to_writer(&mut text, result)
                .map_err(|error| Exit::Run(error.to_string()))?;
            text.push(b'\n');
        }
        output::write(&lines_of(folder, &summary.suite), &text)?;
    }
    let summary = Summary {
        model: results.model.clone(),
        suites: results
            .suites
            .iter()
            .map(|(summary, _)| summary.clone())
            .collect(),
    };
    output::write(&folder.join(SUMMARY), &pretty(&summary)?)
}

fn create_folder(folder: &Path) -> Result<(), Exit> {
    std::fs::create_dir_all(folder)
        .map_err(|error| Exit::Run(format!("creating {}: {error}", folder.display())))
}

/// Returns a value as JSON, whose first line is a brace and a key.
fn pretty(value: &impl Serialize) -> Result<Vec<u8>, Exit> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Exit::Run(error.to_string()))?;
    // `output::check` recognizes files of this command by their first line.
    Ok((text.replacen("{\n ", "{", 1) + "\n").into_bytes())
}

fn is_summary(line: &str) -> bool {
    line.starts_with("{ \"model\":")
}

fn is_comparison(line: &str) -> bool {
    line.starts_with("{ \"a\":")
}

fn is_result_line(line: &str) -> bool {
    serde_json::from_str::<PromptResult>(line).is_ok()
}
