//! A configuration that is written reads as itself.

use std::collections::BTreeMap;
use std::path::Path;

use candle_grpo::config::{ConfigError, Document, Preset, RunConfig};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::json;

use crate::teacher::needs_teacher;

/// Keys with another value than the default, by their section.
const KEYS: &[(&str, &str)] = &[
    ("", "prompts_per_step: 5"),
    ("", "num_generations: 3"),
    ("", "max_prompt_tokens: 9"),
    ("", "epochs: 2"),
    ("", "mini_batch_size: 4"),
    ("", "micro_batch_size: 2"),
    ("", "adapters: {rank: 8, alpha: 16}"),
    ("", "compute_dtype: bf16"),
    ("", "max_grad_norm: 0.5"),
    ("", "top_entropy: 0.2"),
    ("", "sample_filters: [{kind: not_truncated}]"),
    ("recipe", "overlong: {max_length: 30, buffer: 7}"),
    (
        "recipe",
        "policy_loss: {entropy_coef: 0.01, kl: {coef: 0.125}}",
    ),
    ("sampling", "max_new_tokens: 40"),
    ("sampling", "temperature: 0.7"),
    ("sampling", "top_p: 0.9"),
    ("sampling", "stop_strings: ['on', '1']"),
    ("optimizer", "learning_rate: 1e-5"),
    ("optimizer", "beta2: 0.99"),
    ("schedule", "warmup_steps: 3"),
    ("schedule", "decay_until: 50, decay: cosine"),
    ("evaluation", "every_steps: 7"),
    ("evaluation", "samples_per_prompt: 4"),
    ("evaluation", "max_prompts: 3"),
    ("evaluation", "sampler: {max_new_tokens: 6, min_p: 0.1}"),
    (
        "",
        "demonstrations: {batch_size: 2}\ndemonstration_data: {train: d.jsonl}",
    ),
    ("", "environment: {kind: program, command: [cat]}"),
    ("rollout_log", "every_steps: 4"),
    ("", "trackers: [{command: [cat]}]"),
    ("checkpoint", "keep: 3"),
    ("checkpoint", "dtype: bf16"),
    ("", "seed: 9"),
    ("", "max_steps: 11"),
    ("", "threads: 2"),
    ("", "run_dir: 'no'"),
];

/// A file with a preset and some keys.
fn file(preset: Preset, keys: &[(&str, &str)]) -> String {
    let mut text = String::from(
        "model: m\ndata: {train: a.jsonl, held_out_rows: 4}\nrewards: [{kind: json, weight: 0.5}, {kind: exact}]\n",
    );
    if needs_teacher(Some(preset)) {
        text += "teacher: {model: t}\n";
    }
    let name = json!(preset);
    text += &format!("preset: {name}\n");
    let mut sections = BTreeMap::<_, Vec<_>>::new();
    for (section, key) in keys {
        match *section {
            "" => text += &format!("{key}\n"),
            section => sections.entry(section).or_default().push((*key).to_owned()),
        }
    }
    for (section, keys) in sections {
        text += &format!("{section}: {{{}}}\n", keys.join(", "));
    }
    text
}

/// Returns what a run is, without its file.
fn settings(run: &RunConfig) -> Vec<String> {
    vec![
        format!("{:?}", run.model),
        format!("{:?}", run.teacher),
        format!("{:?}", run.data),
        format!("{:?}", run.demonstration_data),
        format!("{:?}", run.max_prompt_tokens),
        format!("{:?}", run.rewards),
        format!("{:?}", run.environment),
        format!("{:?}", run.train),
        format!("{:?}", run.max_steps),
        format!("{:?}", run.evaluation),
        format!("{:?}", run.checkpoint),
        format!("{:?}", run.rollout_log),
        format!("{:?}", run.trackers),
        format!("{:?}", run.run_dir),
        format!("{:?}", run.threads),
    ]
}

fn read(text: &str) -> Result<RunConfig, ConfigError> {
    RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), text)?)
}

proptest! {
    #[test]
    fn what_is_written_reads_as_the_same_run(
        preset in select(&Preset::ALL[..]),
        keys in subsequence(KEYS, 0..=KEYS.len()),
    ) {
        let run = read(&file(preset, &keys));
        // A preset may refuse a key, such as a share of tokens for a loss of sequences.
        prop_assume!(run.is_ok());
        let run = run.unwrap();
        let written = run.to_yaml().unwrap();
        let again = read(&written).unwrap_or_else(|error| panic!("{error}\n{written}"));
        prop_assert_eq!(settings(&again), settings(&run));
        prop_assert_eq!(again.to_yaml().unwrap(), written);
    }
}
