//! `grpo sample`.

use std::io::{Read, stdin};
use std::path::{Path, PathBuf};

use anyhow::Context;
use candle_grpo::config::{ModelConfig, RunConfig};
use candle_grpo::run::{clock_of_run, prompts};
use candle_grpo::train::data::Row;
use candle_grpo::train::find_invalid;
use candle_grpo::train::model::Chat;
use candle_grpo::train::progress::Phase;
use candle_grpo::train::rollout::answer_text;
use candle_grpo::train::{
    ComputeDType, Dataset, Interrupted, Pretrained, Progress, Prompt, Rollout, RunDir,
    SamplingConfig,
};
use serde_json::{Map, Value, json};

use super::console::Console;
use super::exit::Exit;
use super::load;

#[derive(clap::Args)]
pub(super) struct SampleArguments {
    /// The model: a Hugging Face directory, a GGUF file, a run directory (its best checkpoint), or
    /// a Hugging Face hub name.
    model: PathBuf,
    /// The prompt. Default: standard input.
    #[arg(conflicts_with = "row")]
    prompt: Option<String>,
    /// A data row as a JSON object. The model must be a run directory: its data section makes the
    /// prompt and the prefill, and its evaluation sets the stop strings and the length.
    #[arg(long, value_name = "JSON", value_parser = object, conflicts_with_all = ["raw", "system", "prefill"])]
    row: Option<Map<String, Value>>,
    /// Continue the prompt as plain text, without the chat template.
    #[arg(long)]
    raw: bool,
    /// The system message before the prompt.
    #[arg(long, conflicts_with = "raw", value_name = "TEXT")]
    system: Option<String>,
    /// Chat template variables as a JSON object, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = object, conflicts_with = "raw")]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The beginning of the answer.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    prefill: String,
    /// The number of answers.
    #[arg(
        short = 'n',
        long,
        default_value = "1",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    samples: u32,
    /// The maximum answer length in tokens. Default: 256.
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    #[command(flatten)]
    distribution: Distribution,
    /// Stop an answer at this text; can be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// The random seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print a JSON object per answer, with its tokens and their log-probs.
    #[arg(long)]
    json: bool,
    /// Only log warnings, and show no progress.
    #[arg(short, long)]
    quiet: bool,
}

// The distribution of a token. A doc comment would become the description of the command.
#[derive(clap::Args)]
pub(super) struct Distribution {
    /// The sampling temperature; 0 decodes greedily. Default, as for the next three: the model's
    /// generation_config.json. If that does not set `do_sample: true`, a single answer is greedy,
    /// and several are sampled.
    #[arg(short, long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Only sample from the K likeliest tokens; 0 means all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Only sample from the likeliest tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Only sample from tokens with at least P times the highest probability.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f64>,
}

impl Distribution {
    /// Returns `sampling` with the model's distribution and these options. If there are `several`
    /// answers, they are not greedy unless the temperature is 0.
    pub(super) fn of_model(
        &self,
        model: &Pretrained,
        sampling: SamplingConfig,
        several: bool,
    ) -> Result<SamplingConfig, Exit> {
        let defaults = model.generation.apply(sampling);
        let defaults = defaults.map_err(|error| Exit::Model(format!("{error:#}")))?;
        let not_applied = model.generation.not_applied();
        if !not_applied.is_empty() {
            let keys = not_applied.join(", ");
            tracing::info!("generation_config.json: not applied: {keys}");
        }
        self.apply(defaults, several)
    }

    /// Returns whether an option is given.
    pub(super) fn is_given(&self) -> bool {
        let is_narrowed = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        is_narrowed || self.temperature.is_some()
    }

    /// Returns `sampling` with these options. Errors name the option.
    pub(super) fn apply(
        &self,
        sampling: SamplingConfig,
        several: bool,
    ) -> Result<SamplingConfig, Exit> {
        let is_narrowed = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let (temperature, greedy) = match self.temperature {
            Some(temperature) if !(temperature >= 0. && temperature.is_finite()) => {
                return Err(Exit::Config(format!(
                    "--temperature: {temperature}, must be finite and at least 0"
                )));
            }
            Some(0.) => (1., true),
            Some(temperature) => (temperature, false),
            None => (
                sampling.temperature,
                sampling.greedy && !several && !is_narrowed,
            ),
        };
        let sampling = SamplingConfig {
            temperature,
            greedy,
            top_k: self.top_k.unwrap_or(sampling.top_k),
            top_p: self.top_p.unwrap_or(sampling.top_p),
            min_p: self.min_p.unwrap_or(sampling.min_p),
            ..sampling
        };
        match sampling.validate() {
            Ok(()) => Ok(sampling),
            Err(error) => Err(Exit::Config(match find_invalid(&error) {
                Some(invalid) => {
                    let field = invalid.field.split("_strings").next().unwrap_or_default();
                    let option = field.replace('_', "-");
                    format!("--{option}: {}, must {}", invalid.value, invalid.must)
                }
                None => format!("{error:#}"),
            })),
        }
    }
}

/// Parses a JSON object.
pub(super) fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("must be a JSON object: {error}"))
}

/// Prints a model's answers to a prompt.
pub(super) fn sample(arguments: SampleArguments) -> Result<(), Exit> {
    let text = match &arguments.prompt {
        Some(text) => text.clone(),
        None if arguments.row.is_some() => String::new(),
        None => {
            let mut text = String::new();
            stdin()
                .read_to_string(&mut text)
                .map_err(|error| Exit::Data(format!("standard input: {error}")))?;
            // The prompt does not include the last line break.
            text.strip_suffix('\n').unwrap_or(&text).to_owned()
        }
    };
    if text.trim().is_empty() && arguments.row.is_none() {
        return Err(Exit::Config(
            "the prompt is empty, must have at least one character that is not white space"
                .to_owned(),
        ));
    }
    let mut run = match &arguments.row {
        Some(_) => Some(run_of(&arguments.model)?),
        None => None,
    };
    let (distribution, several) = (&arguments.distribution, arguments.samples > 1);
    let sampling = base(&arguments, run.as_ref());
    // Wrong options are errors before the model is loaded.
    distribution.apply(sampling.clone(), several)?;
    let console = Console::new(arguments.quiet);
    console.stop_when_asked();
    // The prompt of a row is that of the run.
    let clock = match run {
        Some(_) => clock_of_run(&arguments.model),
        None => Ok(None),
    };
    let clock = clock.map_err(|error| Exit::Run(format!("{error:#}")))?;
    let mut pretrained = load::model(&ModelConfig {
        path: load::model_file(&arguments.model, &console)?,
        clock,
        ..ModelConfig::default()
    })?;
    let sampling = distribution.of_model(&pretrained, sampling, several)?;
    if let Some(run) = &mut run {
        let template = run.chat_template(&pretrained);
        pretrained.chat_template = template.map_err(|error| Exit::Config(error.to_string()))?;
        run.data.chat_template_kwargs.clear();
    }
    if let Some(variables) = &arguments.chat_template_kwargs {
        load::set_variables(&mut pretrained, variables)?;
    }
    if arguments.system.is_some() && pretrained.chat_template.is_none() {
        return Err(Exit::Model(
            "--system: given, but the model has no chat template".to_owned(),
        ));
    }
    let prompt = match (run, &arguments.row) {
        (Some(run), Some(row)) => prompt_of_row(run, row, &pretrained),
        _ => prompt(&arguments, &text, &pretrained),
    };
    let prompt = prompt.map_err(|error| Exit::Config(format!("{error:#}")))?;
    let (length, positions) = (
        prompt.tokens.len(),
        pretrained.model.max_position_embeddings,
    );
    if sampling.max_new_tokens.saturating_add(length) > positions {
        return Err(Exit::Config(format!(
            "--max-new-tokens: {}, must be at most {}: the model has {positions} positions, and the prompt {length} tokens",
            sampling.max_new_tokens,
            positions.saturating_sub(length)
        )));
    }
    let row = length.saturating_add(sampling.max_new_tokens);
    pretrained.model = pretrained.model.for_rows_of(row);
    let answered = answer(&arguments, sampling, &prompt, &pretrained, &console);
    console.finish();
    let rollouts = answered.map_err(|error| {
        if error.is::<Interrupted>() {
            Exit::Interrupted("No answer is complete.".to_owned())
        } else {
            Exit::Run(format!("{error:#}"))
        }
    })?;
    for (i, (rollout, text)) in rollouts.iter().enumerate() {
        if arguments.json {
            console.print(&as_json(rollout, text).to_string())?;
        } else {
            if rollouts.len() > 1 {
                console.print(&format!("--- {}", i + 1))?;
            }
            console.print(text)?;
        }
    }
    Ok(())
}

/// Returns the sampler settings that do not depend on the model.
fn base(arguments: &SampleArguments, run: Option<&RunConfig>) -> SamplingConfig {
    let of_run = run.map(|run| &run.evaluation.sampler);
    let stop_of_run = of_run.map(|sampler| sampler.stop_strings.clone());
    let length = arguments.max_new_tokens;
    let length = length.or(of_run.map(|sampler| sampler.max_new_tokens));
    SamplingConfig {
        max_new_tokens: length.unwrap_or(SamplingConfig::default().max_new_tokens),
        stop_strings: if arguments.stop.is_empty() {
            stop_of_run.unwrap_or_default()
        } else {
            arguments.stop.clone()
        },
        seed: arguments.seed,
        ..SamplingConfig::default()
    }
}

/// Reads a run's settings from its directory.
fn run_of(folder: &Path) -> Result<RunConfig, Exit> {
    if !RunDir::is_run(folder) {
        return Err(Exit::Config(format!(
            "--row: {} is not a run directory",
            folder.display()
        )));
    }
    RunConfig::read(&RunDir::settings(folder)).map_err(|error| Exit::Config(error.to_string()))
}

/// Makes a row's prompt as the run does.
fn prompt_of_row(
    mut run: RunConfig,
    row: &Map<String, Value>,
    pretrained: &Pretrained,
) -> anyhow::Result<Prompt> {
    run.max_prompt_tokens = usize::MAX;
    let dataset = Dataset::without_rows(&run.data)?;
    let row = Row {
        file: Path::new("--row").into(),
        line: 1,
        columns: Value::Object(row.clone()),
    };
    let prompts = prompts(&run, &dataset, &[row], pretrained)?;
    let prompt = prompts.into_iter().next();
    prompt.context("--row: no prompt")
}

fn prompt(
    arguments: &SampleArguments,
    text: &str,
    pretrained: &Pretrained,
) -> anyhow::Result<Prompt> {
    let template = pretrained.chat_template.as_ref().filter(|_| !arguments.raw);
    let encode = match template {
        Some(_) => Prompt::new,
        None => Prompt::plain,
    };
    let asked = match template {
        Some(template) => {
            let message = |role: &str, text: &str| json!({"role": role, "content": text});
            let system = arguments.system.iter().map(|text| message("system", text));
            let messages: Vec<Value> = system.chain([message("user", text)]).collect();
            template.render(&Chat::new(messages).generation_prompt())?
        }
        None => text.to_owned(),
    };
    let asked = asked + &arguments.prefill;
    encode(0, &asked, Value::Null, &pretrained.tokenizer)
}

fn answer(
    arguments: &SampleArguments,
    sampling: SamplingConfig,
    prompt: &Prompt,
    pretrained: &Pretrained,
    console: &Console,
) -> anyhow::Result<Vec<(Rollout, String)>> {
    let samples = arguments.samples as usize;
    console.begin(Phase::Evaluate, samples);
    let sampler = load::sampler(pretrained, sampling, ComputeDType::F32, console)?;
    let rollouts = sampler.sample(&[prompt], samples, 0)?;
    rollouts
        .into_iter()
        .map(|rollout| {
            let tokens = &rollout.completion.tokens;
            let text = answer_text(tokens, sampler.config(), &pretrained.tokenizer)?;
            Ok((rollout, text))
        })
        .collect()
}

fn as_json(rollout: &Rollout, text: &str) -> Value {
    json!({
        "completion": text,
        "finish_reason": rollout.completion.finish_reason,
        "tokens": rollout.completion.tokens,
        "log_probs": rollout.completion.log_probs,
    })
}
