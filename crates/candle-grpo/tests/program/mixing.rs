//! Training rows from several files by weight.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::support::{folder, grpo, lines, said, succeeds};

const CONFIG: &str = "
model: model
data: {train: [data.jsonl, more.jsonl], weights: [1, 3]}
rewards: [{kind: program, command: [python3, reward.py]}]
prompts_per_step: 4
num_generations: 2
sampling: {max_new_tokens: 4}
checkpoint: {every_steps: 2}
max_steps: 4
run_dir: run
threads: 1
";

/// Notes each prompt, and prefers the letter a.
const REWARD: &str = "
import json, sys
for line in sys.stdin:
    sample = json.loads(line)
    with open('asked', 'a') as file:
        file.write(sample['prompt'] + '\\n')
    print(json.dumps({'id': sample['id'], 'score': sample['completion'].count('a')}), flush=True)
";

fn with_files(config: &str) -> TempDir {
    let folder = folder(config);
    let rows: String = ["aaa", "bbb", "ccc", "ddd"]
        .iter()
        .map(|prompt| format!("{{\"prompt\": \"{prompt}\"}}\n"))
        .collect();
    fs::write(folder.path().join("more.jsonl"), rows).unwrap();
    fs::write(folder.path().join("reward.py"), REWARD).unwrap();
    folder
}

/// Returns each step's prompts, with 8 completions each.
fn asked(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("asked")).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn each_step_has_the_shares_of_the_files() {
    let folder = with_files(CONFIG);
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    let asked = asked(folder.path());
    assert_eq!(asked.len(), 32);
    for step in asked.chunks(8) {
        let of_second = step.iter().filter(|prompt| {
            prompt.len() == 3 && ["aaa", "bbb", "ccc", "ddd"].contains(&prompt.as_str())
        });
        assert_eq!(of_second.count(), 6, "{step:?}");
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_same_prompts() {
    let whole = with_files(CONFIG);
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    let resumed = with_files(&CONFIG.replace("max_steps: 4", "max_steps: 2"));
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    fs::write(resumed.path().join("run.yaml"), CONFIG).unwrap();
    succeeds(
        resumed.path(),
        &["train", "run.yaml", "--quiet", "--resume"],
    );
    assert_eq!(asked(whole.path()), asked(resumed.path()));
    let metrics = |folder: &TempDir| lines(&folder.path().join("run/metrics.jsonl"));
    assert_eq!(metrics(&whole), metrics(&resumed));
}

#[test]
fn weights_that_do_not_fit_are_errors_with_their_key() {
    for (weights, words) in [
        (
            "[1]",
            "run.yaml:3: data.weights: 1 weights, must be one for each of 2 files of train",
        ),
        (
            "[1, -1]",
            "run.yaml:3: data.weights[1]: -1, must be finite and at least 0",
        ),
        (
            "[0, 0]",
            "run.yaml:3: data.weights: [0.0, 0.0], must have a sum above 0",
        ),
    ] {
        let folder = with_files(&CONFIG.replace("[1, 3]", weights));
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    // All prompts of the second file are too long.
    let config = format!("{CONFIG}max_prompt_tokens: 2\n");
    let folder = with_files(&config);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let words = "data.weights[1]: 3, must be 0 for a source without rows";
    assert!(said(&output).contains(words), "{}", said(&output));
}
