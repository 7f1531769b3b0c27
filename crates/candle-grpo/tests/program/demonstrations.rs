//! Given answers beside rewards.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::support::{folder, grpo, lines, said, succeeds};

/// The reward is the same for all completions.
const CONFIG: &str = "
model: model
data: {train: data.jsonl}
demonstration_data: {train: answers.jsonl}
rewards: [{kind: regex, pattern: '^'}]
prompts_per_step: 4
demonstrations: {batch_size: 4, coef: {peak: 0.5}}
num_generations: 4
sampling: {max_new_tokens: 6}
optimizer: {learning_rate: 1e-2}
checkpoint: {every_steps: 4}
max_steps: 8
run_dir: run
threads: 1
";

/// Writes answers that repeat the prompt's last character three times.
fn write_answers(folder: &Path, prompts: &[&str]) {
    let rows = prompts.iter().map(|prompt| {
        let last = &prompt[prompt.len() - 1..];
        json!({"prompt": prompt, "completion": last.repeat(3)}).to_string() + "\n"
    });
    fs::write(folder.join("answers.jsonl"), rows.collect::<String>()).unwrap();
}

const PROMPTS: [&str; 6] = ["abc", "d", "ee", "ca", "b", "cd"];

#[test]
fn a_policy_without_a_signal_learns_from_answers_and_resumes_bit_identically() {
    let whole = folder(CONFIG);
    let resumed = folder(&CONFIG.replace("max_steps: 8", "max_steps: 4"));
    for folder in [&whole, &resumed] {
        write_answers(folder.path(), &PROMPTS);
        succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    }
    fs::write(resumed.path().join("run.yaml"), CONFIG).unwrap();
    let resume = ["train", "run.yaml", "--quiet", "--resume"];
    succeeds(resumed.path(), &resume);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics, lines(&resumed.path().join("run/metrics.jsonl")));
    let loss = |step: usize| metrics[step]["demonstration_loss"].as_f64().unwrap();
    assert!(loss(7) < 0.8 * loss(0), "{} {}", loss(0), loss(7));
    assert!(metrics.iter().all(|step| step["skipped"] == false));
    assert_eq!(metrics[0]["demonstration_coef"], 0.5);
}

#[test]
fn other_answers_are_noted_when_a_run_resumes() {
    let folder = folder(&CONFIG.replace("max_steps: 8", "max_steps: 4"));
    write_answers(folder.path(), &PROMPTS);
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    fs::write(folder.path().join("run.yaml"), CONFIG).unwrap();
    write_answers(folder.path(), &PROMPTS[..5]);
    let output = grpo(folder.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let words = "the rows in demonstration_data are other ones (6, now 5)";
    assert!(said(&output).contains(words), "{}", said(&output));
    // The same rows in a file of another name are the same run.
    fs::rename(
        folder.path().join("answers.jsonl"),
        folder.path().join("renamed.jsonl"),
    )
    .unwrap();
    let renamed = CONFIG
        .replace("answers.jsonl", "renamed.jsonl")
        .replace("max_steps: 8", "max_steps: 9");
    fs::write(folder.path().join("run.yaml"), renamed).unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
}

#[test]
fn the_check_counts_demonstrations_and_names_what_is_wrong() {
    let folder = folder(CONFIG);
    write_answers(folder.path(), &PROMPTS);
    let text = succeeds(folder.path(), &["check", "run.yaml"]);
    assert!(
        text.contains("Demonstrations: 6, with 35 tokens, 24 of which train."),
        "{text}"
    );
    for (from, to, words) in [
        (
            "demonstration_data: {train: answers.jsonl}\n",
            "",
            "run.yaml:6: demonstrations: given, but there are no rows: give demonstration_data.train",
        ),
        (
            "demonstrations: {batch_size: 4, coef: {peak: 0.5}}\n",
            "",
            "run.yaml:4: demonstration_data: given, but they have no share in the loss: give demonstrations",
        ),
        (
            "{train: answers.jsonl}",
            "{train: answers.jsonl, held_out_rows: 1}",
            "run.yaml:4: demonstration_data.held_out_rows: given, must be absent",
        ),
        (
            "{train: answers.jsonl}",
            "{train: none.jsonl}",
            "none.jsonl",
        ),
        (
            "{train: answers.jsonl}",
            "{train: answers.jsonl, max_length: 1}",
            "run.yaml:4: demonstration_data.max_length: 1, must leave a row",
        ),
        (
            "{train: answers.jsonl}",
            "{train: run/answers.jsonl}",
            "run.yaml:4: demonstration_data.train: run/answers.jsonl, must lie outside of run_dir",
        ),
        (
            "{peak: 0.5}",
            "{peak: 2}",
            "run.yaml:7: demonstrations.coef.peak: 2, must be",
        ),
    ] {
        fs::write(folder.path().join("run.yaml"), CONFIG.replacen(from, to, 1)).unwrap();
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert_ne!(output.status.code(), Some(0), "{words}");
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}
