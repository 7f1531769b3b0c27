//! `grpo check` on valid configurations, changing one key after another.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use candle_core::Device;
use candle_grpo::config::{Document, Preset, RunConfig};
use candle_grpo::nn::{DecoderConfig, Parameters};
use candle_grpo::run::{RunPrompts, load_model_without_weights};
use candle_grpo::train::Pretrained;
use candle_grpo::train::model::{SpecialTokens, character_tokenizer};
use candle_grpo_fuzz::{decoder, folder, write};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

#[path = "../../crates/candle-grpo/tests/program/mutation.rs"]
mod mutation;

/// Maximum number of changes to one configuration.
const CHANGES: usize = 16;

/// Returns a configuration for each preset, and its effective form.
fn bases() -> &'static [(Value, Value)] {
    static BASES: OnceLock<Vec<(Value, Value)>> = OnceLock::new();
    BASES.get_or_init(|| {
        write_model();
        let rows = ["a", "b", "c"].map(|prompt| json!({"prompt": prompt, "answer": 1}).to_string());
        write("data.jsonl", rows.join("\n").as_bytes());
        let file = |name: &str| folder().join(name);
        let rewards = json!([
            {"kind": "numeric"},
            {"kind": "exact", "name": "same", "weight": 0.5},
            {"kind": "regex", "pattern": "a+"},
            {"kind": "tags", "tags": ["think", "answer"]},
            {"kind": "json", "column": "answer"},
            {"kind": "length", "max_length": 9, "buffer": 3},
            {"kind": "repetition"},
            {"kind": "program", "command": ["sh", file("data.jsonl")], "folder": folder()},
            {"kind": "ensemble", "combine": {"weighted": [1, 2]}, "judges": [
                {"kind": "numeric"},
                {"kind": "regex", "pattern": "b", "whole": true},
            ]},
        ]);
        let presets = Preset::ALL.iter().map(|preset| json!(preset));
        let base = |preset: Value| {
            let base = json!({
                "model": {"path": file("model")},
                "data": {"train": [file("data.jsonl")], "held_out_rows": 1},
                "rewards": rewards,
                "preset": preset,
                "sampling": {"max_new_tokens": 9},
                "evaluation": {"samples_per_prompt": 4, "pass_at": [1, 2]},
            });
            let run = check(&base).expect("a preset is valid");
            let effective = run.to_value().expect("it can be written");
            (base, effective)
        };
        presets.chain([Value::Null]).map(base).collect()
    })
}

fn write_model() {
    let model = DecoderConfig {
        max_position_embeddings: 64,
        ..decoder()
    };
    let parameters = Parameters::init(&model, 1, &Device::Cpu).expect("a tiny model");
    let tokenizer = character_tokenizer("abc").expect("three letters");
    let pretrained = Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![0],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(model, parameters, tokenizer)
    };
    let folder = folder().join("model");
    pretrained.save(&folder).expect("room for a tiny model");
}

/// Checks a configuration with everything it names, like `grpo check`.
fn check(value: &Value) -> Option<RunConfig> {
    let document = Document::from_yaml(Path::new("run.yaml"), &value.to_string());
    let run = RunConfig::new(&document.expect("JSON is YAML"))
        .inspect_err(|error| assert!(error.to_string().starts_with("run.yaml"), "{error}"))
        .ok()?;
    run.check_files().ok()?;
    let pretrained = load_model_without_weights(&run).ok()?;
    RunPrompts::read(&run, &pretrained).ok()?;
    Some(run)
}

fuzz_target!(|bytes: &[u8]| {
    let bases = bases();
    let mut bytes = bytes.iter();
    let mut choose = |below: usize| {
        let mut next = || usize::from(bytes.next().copied().unwrap_or(0));
        (next() << 8 | next()) % below
    };
    let (mut valid, mut effective) = bases[choose(bases.len())].clone();
    for _ in 0..CHANGES {
        // A rejected change is undone, so the next one starts from a valid configuration.
        let changed = mutation::mutated(&valid, &effective, &mut choose);
        let Some(run) = check(&changed) else {
            continue;
        };
        let text = run.to_yaml().expect("a configuration can be written");
        let again = Document::from_yaml(Path::new("again.yaml"), &text).expect("it can be read");
        let again = RunConfig::new(&again).expect("it is as valid as the first");
        assert_eq!(again.to_yaml().ok(), Some(text));
        effective = run.to_value().expect("it can be written");
        valid = changed;
    }
});
