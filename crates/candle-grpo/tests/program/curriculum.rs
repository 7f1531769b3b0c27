//! Prompts by how well the policy solves them.

use std::fs;

use tempfile::TempDir;

use super::support::{folder, grpo, lines, said, succeeds};

const CONFIG: &str = "
model: model
data: {train: data.jsonl, curriculum: {thresholds: [0.3, 0.7, 1], weights: [0.2, 1, 0.2]}}
rewards: [{kind: regex, pattern: '^[abc]'}]
prompts_per_step: 4
num_generations: 4
sampling: {max_new_tokens: 6}
rollout_log: {every_steps: 1, max_groups: 4}
checkpoint: {every_steps: 2}
max_steps: 6
run_dir: run
threads: 1
";

#[test]
fn a_resumed_run_goes_on_with_the_same_prompts_and_pools() {
    let whole = folder(CONFIG);
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    let resumed = folder(&CONFIG.replace("max_steps: 6", "max_steps: 2"));
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    fs::write(resumed.path().join("run.yaml"), CONFIG).unwrap();
    let resume = ["train", "run.yaml", "--quiet", "--resume"];
    succeeds(resumed.path(), &resume);
    let log = |folder: &TempDir, name: &str| lines(&folder.path().join("run").join(name));
    for name in ["metrics.jsonl", "rollouts.jsonl"] {
        assert_eq!(log(&whole, name), log(&resumed, name));
    }
    let metrics = log(&whole, "metrics.jsonl");
    assert_eq!(metrics[0]["curriculum_unseen"], 6.);
    let pools = [
        "curriculum_pool_0",
        "curriculum_pool_1",
        "curriculum_pool_2",
        "curriculum_unseen",
    ];
    for step in &metrics {
        let prompts: f64 = pools.iter().map(|name| step[name].as_f64().unwrap()).sum();
        assert_eq!(prompts, 10., "{step}");
    }
}

#[test]
fn pools_that_are_not_valid_are_errors_with_their_key() {
    for (pools, words) in [
        (
            "{thresholds: [0.7, 0.3]}",
            "run.yaml:3: data.curriculum.thresholds: [0.7, 0.3], must be finite numbers in ascending order",
        ),
        (
            "{weights: [1, 1]}",
            "run.yaml:3: data.curriculum.weights: 2, must be one for each threshold, 3",
        ),
        (
            "{unseen_weight: 0}",
            "run.yaml:3: data.curriculum.unseen_weight: 0, must be above 0",
        ),
        ("{bounds: [1]}", "data.curriculum.bounds"),
    ] {
        let config = CONFIG.replace("{thresholds: [0.3, 0.7, 1], weights: [0.2, 1, 0.2]}", pools);
        let folder = folder(&config);
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    let config = CONFIG.replace("curriculum: {", "weights: [1], curriculum: {");
    let folder = folder(&config);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    let words = "data.curriculum: given, must be absent with weights";
    assert!(
        said(&output).contains("data.curriculum"),
        "{}: {words}",
        said(&output)
    );
}
