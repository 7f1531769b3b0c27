//! Models with separate frequencies for short and long rows.

use std::fs;
use std::path::Path;

use candle_grpo::nn::{DecoderConfig, ModelType, RopeScaling};
use serde_json::Value;

use crate::support::{CONFIG, folder, lines, model, succeeds, write_decoder};

/// The longest row in pretraining. Rows in [`CONFIG`] have up to 9 tokens.
const ORIGINAL: usize = 12;

const SHORT: [f64; 2] = [1.0, 2.0];
const LONG: [f64; 2] = [3.0, 9.0];

/// Writes a model with the same weights for any factors.
fn write_phi(folder: &Path, short: [f64; 2], long: [f64; 2]) {
    let model = DecoderConfig {
        model_type: ModelType::Phi3,
        max_position_embeddings: 48,
        rope_scaling: RopeScaling::LongRope {
            short_factor: short.to_vec(),
            long_factor: long.to_vec(),
            original_max_position_embeddings: ORIGINAL,
            factor: 4.,
            attention_factor: None,
            short_rows: false,
        },
        ..model()
    };
    write_decoder(folder, model, "abcde", 3);
}

/// Returns the results from a run, an evaluation and a sample with these factors.
fn results(short: [f64; 2], long: [f64; 2], response_length: usize) -> (Vec<Value>, Vec<String>) {
    let config = CONFIG.replace("max_steps: 12", "max_steps: 2").replace(
        "max_new_tokens: 6",
        &format!("max_new_tokens: {response_length}"),
    );
    let folder = folder(&config);
    let path = folder.path();
    fs::remove_dir_all(path.join("model")).unwrap();
    write_phi(&path.join("model"), short, long);
    let check = succeeds(path, &["check", "run.yaml"]);
    let list = if response_length < ORIGINAL - 3 {
        "Rotary frequencies of short_factor: the longest row has 9 tokens"
    } else {
        "Rotary frequencies of long_factor"
    };
    assert!(check.contains(list), "{check}");
    succeeds(path, &["train", "run.yaml"]);
    let length = response_length.to_string();
    let sample = [
        "sample",
        "run",
        "--raw",
        "abc",
        "--json",
        "--max-new-tokens",
        &length,
    ];
    let outputs = [
        succeeds(path, &["eval", "run.yaml", "--quiet"]),
        succeeds(path, &sample),
    ];
    let config = fs::read_to_string(path.join("run/checkpoints/step-000002/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["max_position_embeddings"], 48);
    assert!(config["rope_scaling"].get("short_rows").is_none());
    (lines(&path.join("run/metrics.jsonl")), outputs.to_vec())
}

/// The list that is not used has no influence.
#[test]
fn a_run_has_the_short_factors_if_its_rows_fit_them() {
    let short = results(SHORT, LONG, 6);
    assert_eq!(short, results(SHORT, [1.0, 1.0], 6));
    assert_ne!(short, results(LONG, LONG, 6));
    let long = results(SHORT, LONG, 14);
    assert_eq!(long, results([1.0, 1.0], LONG, 14));
}
