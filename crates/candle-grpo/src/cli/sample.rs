//! `grpo sample`.

use std::io::{Read, stdin};
use std::path::PathBuf;

use candle_grpo::config::ModelConfig;
use candle_grpo::train::find_invalid;
use candle_grpo::train::model::Chat;
use candle_grpo::train::progress::Phase;
use candle_grpo::train::{Interrupted, Pretrained, Progress, Prompt, Rollout, SamplingConfig};
use serde_json::{Value, json};

use super::console::Console;
use super::exit::Exit;
use super::load;

#[derive(clap::Args)]
pub(super) struct SampleArguments {
    /// The model: a Hugging Face folder, a GGUF file, the folder of a run (its best checkpoint),
    /// or a name on the Hugging Face hub.
    model: PathBuf,
    /// The prompt. Absent: standard input.
    prompt: Option<String>,
    /// Continue the prompt as a text, without the chat template of the model.
    #[arg(long)]
    raw: bool,
    /// The system message before the prompt.
    #[arg(long, conflicts_with = "raw", value_name = "TEXT")]
    system: Option<String>,
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
    /// The maximum length of an answer in tokens.
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_new_tokens: usize,
    /// The sampling temperature; 0 takes the likeliest token each time.
    #[arg(short, long, default_value_t = 1., allow_negative_numbers = true)]
    temperature: f64,
    /// Sample from the K likeliest tokens; 0 is all.
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Sample from the likeliest tokens whose probabilities add up to P.
    #[arg(
        long,
        default_value_t = 1.,
        value_name = "P",
        allow_negative_numbers = true
    )]
    top_p: f64,
    /// Sample from tokens with at least P times the highest probability.
    #[arg(
        long,
        default_value_t = 0.,
        value_name = "P",
        allow_negative_numbers = true
    )]
    min_p: f64,
    /// Stop an answer at this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// The seed of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print an object of JSON for each answer, with its tokens and their log-probs.
    #[arg(long)]
    json: bool,
    /// Log warnings only, and show no progress.
    #[arg(short, long)]
    quiet: bool,
}

/// Prints the answers of a model to a prompt.
pub(super) fn sample(arguments: SampleArguments) -> Result<(), Exit> {
    let text = match &arguments.prompt {
        Some(text) => text.clone(),
        None => {
            let mut text = String::new();
            stdin()
                .read_to_string(&mut text)
                .map_err(|error| Exit::Data(format!("standard input: {error}")))?;
            // The prompt does not include the last line break.
            text.strip_suffix('\n').unwrap_or(&text).to_owned()
        }
    };
    if text.trim().is_empty() {
        return Err(Exit::Config(
            "the prompt is empty, must have at least one character that is not white space"
                .to_owned(),
        ));
    }
    let sampling = sampling(&arguments)?;
    let console = Console::new(arguments.quiet);
    console.stop_when_asked();
    let pretrained = load::model(&ModelConfig {
        path: load::model_file(&arguments.model, &console)?,
        chat_template: None,
    })?;
    if arguments.system.is_some() && pretrained.chat_template.is_none() {
        return Err(Exit::Model(
            "--system: given, but the model has no chat template".to_owned(),
        ));
    }
    let prompt = prompt(&arguments, &text, &pretrained)
        .map_err(|error| Exit::Config(format!("{error:#}")))?;
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
    let answered = answer(&arguments, sampling, &prompt, &pretrained, &console);
    console.finish();
    let rollouts = answered.map_err(|error| match error.is::<Interrupted>() {
        true => Exit::Interrupted("No answer is complete.".to_owned()),
        false => Exit::Run(format!("{error:#}")),
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

/// Returns the settings of the sampler. An error names the option.
fn sampling(arguments: &SampleArguments) -> Result<SamplingConfig, Exit> {
    let temperature = arguments.temperature;
    if !(temperature >= 0. && temperature.is_finite()) {
        return Err(Exit::Config(format!(
            "--temperature: {temperature}, must be finite and at least 0"
        )));
    }
    let greedy = temperature == 0.;
    let sampling = SamplingConfig {
        temperature: if greedy { 1. } else { temperature },
        greedy,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        max_new_tokens: arguments.max_new_tokens,
        stop_strings: arguments.stop.clone(),
        seed: arguments.seed,
        ..SamplingConfig::default()
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

fn prompt(
    arguments: &SampleArguments,
    text: &str,
    pretrained: &Pretrained,
) -> anyhow::Result<Prompt> {
    let template = pretrained.chat_template.as_ref().filter(|_| !arguments.raw);
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
    Prompt::new(0, &asked, Value::Null, &pretrained.tokenizer)
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
    let sampler = load::sampler(pretrained, sampling, console)?;
    let rollouts = sampler.sample(&[prompt], samples, 0)?;
    rollouts
        .into_iter()
        .map(|rollout| {
            let text = pretrained
                .tokenizer
                .decode(&rollout.completion.tokens, true)
                .map_err(|error| anyhow::anyhow!("{error}"))?;
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
