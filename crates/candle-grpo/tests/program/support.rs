//! A tiny model with prompts, and the program.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use candle_core::Device;
use candle_grpo::nn::{DecoderConfig, Parameters};
use candle_grpo::train::model::{SpecialTokens, character_tokenizer};
use candle_grpo::train::{FinishReason, Pretrained, Sample};
use candle_grpo_test_support::TINY_DECODER;
use serde_json::{Value, json};

pub(crate) const CONFIG: &str = "
model: model
data: {train: data.jsonl, held_out_rows: 4}
rewards: [{kind: regex, pattern: '^[ab]'}]
prompts_per_step: 4
num_generations: 4
sampling: {max_new_tokens: 6}
recipe: {policy_loss: {kl: {coef: 0.01}}}
optimizer: {learning_rate: 3e-3}
evaluation: {every_steps: 4, samples_per_prompt: 4, pass_at: [1, 2]}
checkpoint: {every_steps: 3}
max_steps: 12
run_dir: run
threads: 1
";

/// A completion for a row of data, as rewards that read only these see it.
pub(crate) fn sample<'a>(columns: &'a Value, completion: &'a str, group: usize) -> Sample<'a> {
    Sample {
        prompt: "",
        messages: &[],
        completion,
        prompt_tokens: &[],
        completion_tokens: &[],
        finish_reason: FinishReason::StopToken,
        columns,
        group,
    }
}

/// [`CONFIG`] with this many steps of 2 prompts, and an evaluation and a checkpoint every 2 steps.
pub(crate) fn short_config(steps: usize) -> String {
    let mut config = CONFIG.to_owned();
    for (text, other) in [
        ("max_steps: 12", &*format!("max_steps: {steps}")),
        ("prompts_per_step: 4", "prompts_per_step: 2"),
        (
            "{every_steps: 4, samples_per_prompt: 4, pass_at: [1, 2]}",
            "{every_steps: 2}",
        ),
        ("{every_steps: 3}", "{every_steps: 2}"),
    ] {
        assert!(config.contains(text), "{text}");
        config = config.replace(text, other);
    }
    config
}

/// Returns `config` without this section's line.
pub(crate) fn without(config: &str, section: &str) -> String {
    let start = format!("{section}: ");
    let (lines, others): (Vec<&str>, Vec<&str>) =
        (config.split_inclusive('\n')).partition(|line| line.starts_with(&start));
    assert_eq!(lines.len(), 1, "{section} in {config}");
    others.concat()
}

pub(crate) fn model() -> DecoderConfig {
    serde_json::from_str(TINY_DECODER).unwrap()
}

/// Writes a model with a token for each character in `alphabet`.
pub(crate) fn write_model(folder: &Path, alphabet: &str) {
    write_long_model(folder, alphabet, model().max_position_embeddings, 3);
}

/// [`write_model`] with a number of positions and a weight seed.
pub(crate) fn write_long_model(folder: &Path, alphabet: &str, positions: usize, seed: u64) {
    let model = DecoderConfig {
        vocab_size: model().vocab_size.max(alphabet.chars().count() + 1),
        max_position_embeddings: positions,
        ..model()
    };
    write_decoder(folder, model, alphabet, seed);
}

/// [`write_model`] with any model configuration.
pub(crate) fn write_decoder(folder: &Path, model: DecoderConfig, alphabet: &str, seed: u64) {
    let parameters = Parameters::init(&model, seed, &Device::Cpu).unwrap();
    let tokenizer = character_tokenizer(alphabet).unwrap();
    let pretrained = Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![0],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(model, parameters, tokenizer)
    };
    pretrained.save(folder).unwrap();
}

/// A folder with a model, prompts and a configuration.
pub(crate) fn folder(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("model"), "abcde");
    let rows = ["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"];
    let rows: String = rows
        .iter()
        .map(|prompt| json!({ "prompt": prompt }).to_string() + "\n")
        .collect();
    fs::write(folder.path().join("data.jsonl"), rows).unwrap();
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    folder
}

pub(crate) fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo"));
    command.current_dir(folder).args(arguments);
    command
}

pub(crate) fn grpo(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().unwrap()
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn succeeds(folder: &Path, arguments: &[&str]) -> String {
    let output = grpo(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| {
            let mut value: Value = serde_json::from_str(line).unwrap();
            // Those of two runs differ.
            if let Some(line) = value.as_object_mut() {
                line.remove("seconds");
            }
            value
        })
        .collect()
}
