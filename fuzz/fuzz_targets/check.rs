//! `grpo check` on valid configurations with some keys changed.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use candle_grpo::config::{Document, Preset, RunConfig};
use candle_grpo_fuzz::{folder, write};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

#[path = "../../crates/candle-grpo/tests/program/mutation.rs"]
mod mutation;

/// Returns a configuration for each preset, and its effective form.
fn bases() -> &'static [(Value, Value)] {
    static BASES: OnceLock<Vec<(Value, Value)>> = OnceLock::new();
    BASES.get_or_init(|| {
        write("data.jsonl", b"{\"prompt\": \"a\", \"answer\": 1}\n{\"prompt\": \"b\", \"answer\": 2}\n");
        let data = folder().join("data.jsonl");
        let presets = Preset::ALL.iter().map(|preset| json!(preset));
        let base = |preset: Value| {
            let base = json!({
                "model": "model",
                "data": {"train": data, "held_out_rows": 1},
                "rewards": [{"kind": "numeric"}, {"kind": "length", "max_length": 9, "buffer": 3}],
                "algorithm": {"preset": preset, "response_length": 9},
            });
            let run = RunConfig::new(&document(&base)).expect("a preset is valid");
            let effective = run.to_value().expect("it can be written");
            (base, effective)
        };
        presets.chain([Value::Null]).map(base).collect()
    })
}

fn document(value: &Value) -> Document {
    Document::from_yaml(Path::new("run.yaml"), &value.to_string()).expect("JSON is YAML")
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.iter();
    let mut choose = |below: usize| {
        let mut next = || usize::from(bytes.next().copied().unwrap_or(0));
        (next() << 8 | next()) % below
    };
    let (base, effective) = &bases()[choose(bases().len())];
    let changed = mutation::mutated(base, effective, &mut choose);
    let Ok(config) = RunConfig::new(&document(&changed)) else {
        return;
    };
    // The files are read only where the configuration is valid, as `grpo check` does it.
    if config.check_files().is_ok() {
        let _ = config.data.load(config.seed());
    }
    let text = config.to_yaml().expect("a configuration can be written");
    let again = Document::from_yaml(Path::new("again.yaml"), &text).expect("it can be read");
    let again = RunConfig::new(&again).expect("it is as valid as the first");
    assert_eq!(again.to_yaml().ok(), Some(text));
});
