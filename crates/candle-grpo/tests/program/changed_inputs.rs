//! `grpo train --resume` after something has changed since the run began.

use std::fs;
use std::path::Path;
use std::process::Output;

use candle_core::Device;
use candle_grpo::nn::Parameters;
use candle_grpo::train::Pretrained;
use rstest::rstest;
use serde_json::{Value, json};

use super::support::{CONFIG, folder, grpo, lines, said, succeeds};

/// Writes a six-step run, which could continue to nine.
fn run() -> tempfile::TempDir {
    run_of(CONFIG)
}

fn run_of(config: &str) -> tempfile::TempDir {
    // The held-out rows are a file, so that training rows can change alone.
    let config = config.replace("held_out_rows: 4", "held_out: held_out.jsonl");
    let folder = folder(&config.replace("max_steps: 12", "max_steps: 6"));
    write_rows(&folder.path().join("held_out.jsonl"), &["ce", "ad", "bb"]);
    succeeds(folder.path(), &["train", "run.yaml"]);
    change(folder.path(), "max_steps: 6", "max_steps: 9");
    folder
}

fn write_rows(path: &Path, prompts: &[&str]) {
    let rows = prompts.iter();
    let rows: String = rows
        .map(|prompt| json!({ "prompt": prompt }).to_string() + "\n")
        .collect();
    fs::write(path, rows).unwrap();
}

/// Replaces text in the configuration.
fn change(folder: &Path, from: &str, to: &str) {
    let path = folder.join("run.yaml");
    let config = fs::read_to_string(&path).unwrap();
    assert!(config.contains(from), "{from}");
    fs::write(path, config.replace(from, to)).unwrap();
}

fn resume(folder: &Path, more: &[&str]) -> Output {
    grpo(folder, &[&["train", "run.yaml", "--resume"], more].concat())
}

fn steps(folder: &Path) -> usize {
    lines(&folder.join("run/metrics.jsonl")).len()
}

/// It is refused with these words and leaves the run as it is, until it is accepted.
fn assert_refused_until_accepted(folder: &Path, words: &str) {
    let before = steps(folder);
    let refused = resume(folder, &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    for words in [words, "--accept-changes"] {
        assert!(
            said(&refused).contains(words),
            "{words:?} in {}",
            said(&refused)
        );
    }
    assert_eq!(steps(folder), before);
    let accepted = resume(folder, &["--accept-changes"]);
    assert_eq!(accepted.status.code(), Some(0), "{}", said(&accepted));
    assert_eq!(steps(folder), 9);
    // It is what the run now has.
    let again = resume(folder, &[]);
    assert_eq!(again.status.code(), Some(0), "{}", said(&again));
    assert!(!said(&again).contains("WARN"), "{}", said(&again));
}

#[test]
fn unchanged_inputs_are_no_warning() {
    let folder = run();
    // Another name for the same rows, in another place.
    fs::create_dir(folder.path().join("data")).unwrap();
    fs::rename(
        folder.path().join("data.jsonl"),
        folder.path().join("data/rows.jsonl"),
    )
    .unwrap();
    change(folder.path(), "data.jsonl", "data/rows.jsonl");
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let warnings: Vec<String> = said(&output)
        .lines()
        .filter(|line| line.contains("WARN"))
        .map(str::to_owned)
        .collect();
    let expected = ["another data.train", "another max_steps"];
    assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
    for (warning, words) in warnings.iter().zip(expected) {
        assert!(warning.contains(words), "{warning}");
    }
}

#[rstest]
#[case::appended(&["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab", "eea"], "1 training rows were added")]
#[case::reordered(&["d", "abc", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"], "the training rows have another order")]
#[case::replaced(&["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "e"], "the training rows are other ones (10, now 10)")]
#[case::removed(&["abc", "d", "ee"], "the training rows are other ones (10, now 3)")]
fn other_training_rows_are_a_warning(#[case] prompts: &[&str], #[case] words: &str) {
    let folder = run();
    write_rows(&folder.path().join("data.jsonl"), prompts);
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains(words), "{}", said(&output));
    assert_eq!(steps(folder.path()), 9);
}

#[rstest]
#[case::appended(&["ce", "ad", "bb", "ea"])]
#[case::reordered(&["ad", "ce", "bb"])]
#[case::replaced(&["ce", "ad", "be"])]
fn other_held_out_rows_are_refused(#[case] prompts: &[&str]) {
    let folder = run();
    write_rows(&folder.path().join("held_out.jsonl"), prompts);
    let words = format!(
        "the held-out rows are other ones (3, now {})",
        prompts.len()
    );
    assert_refused_until_accepted(folder.path(), &words);
}

/// Rows that are added change which are drawn to be held out.
#[test]
fn another_split_of_the_same_file_is_refused() {
    let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 6"));
    succeeds(folder.path(), &["train", "run.yaml"]);
    change(folder.path(), "max_steps: 6", "max_steps: 9");
    let path = folder.path().join("data.jsonl");
    let rows = fs::read_to_string(&path).unwrap();
    fs::write(&path, rows + "{\"prompt\": \"eea\"}\n").unwrap();
    assert_refused_until_accepted(folder.path(), "the held-out rows are other ones (4, now 4)");
}

/// Replaces the model weights.
fn change_model(folder: &Path) {
    let path = folder.join("model");
    let model = Pretrained::load(&path, &Device::Cpu).unwrap();
    let parameters = Parameters::init(&model.model, 4, &Device::Cpu).unwrap();
    fs::remove_dir_all(&path).unwrap();
    model.with_parameters(parameters).save(&path).unwrap();
}

#[test]
fn another_model_is_refused() {
    let folder = run_of(&CONFIG.replace("kl: {coef: 0.01}", "kl: null"));
    change_model(folder.path());
    assert_refused_until_accepted(folder.path(), "the model has other weights");
}

/// `--accept-changes` is not offered where it cannot work.
#[test]
fn a_change_that_the_checkpoint_does_not_fit_cannot_be_accepted() {
    let other_model: fn(&Path) = change_model;
    let no_reference: fn(&Path) = |folder| change(folder, "kl: {coef: 0.01}", "kl: null");
    for (change, words) in [
        (
            other_model,
            [
                "the model has other weights",
                "only a run with the first model",
            ],
        ),
        (
            no_reference,
            [
                "started with different settings: ",
                "cannot go on without them",
            ],
        ),
    ] {
        let folder = run();
        change(folder.path());
        for arguments in [&[][..], &["--accept-changes"]] {
            let refused = resume(folder.path(), arguments);
            assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
            for words in [words[0], words[1], "this cannot be accepted"] {
                assert!(said(&refused).contains(words), "{}", said(&refused));
            }
            assert!(!said(&refused).contains("--accept-changes"));
            assert_eq!(steps(folder.path()), 6);
        }
    }
}

#[test]
fn damaged_digests_are_described_in_plain_words() {
    let folder = run();
    fs::write(folder.path().join("run/inputs.json"), "{\n\"weights\": ").unwrap();
    let refused = resume(folder.path(), &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    for words in [
        "remove the file",
        "inputs.json:2:",
        "it ends within a JSON value",
    ] {
        assert!(said(&refused).contains(words), "{}", said(&refused));
    }
}

#[test]
fn a_checkpoint_with_a_file_of_others_is_set_aside_with_a_warning() {
    let folder = run();
    let checkpoints = folder.path().join("run/checkpoints");
    fs::write(checkpoints.join("step-000006/notes.txt"), "mine").unwrap();
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    for words in [
        "notes.txt: was not written with the others; it is skipped",
        "a checkpoint with unknown files, renamed instead of removed",
    ] {
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    let kept = fs::read_dir(&checkpoints).unwrap();
    let mut kept = kept.map(|entry| entry.unwrap().path());
    assert!(kept.any(|path| path.join("notes.txt").exists()
        && path.display().to_string().contains("step-000006.kept-")));
}

#[test]
fn another_chat_template_is_refused() {
    let folder = run();
    fs::write(
        folder.path().join("template.jinja"),
        "{{ messages[0].content }}",
    )
    .unwrap();
    change(
        folder.path(),
        "model: model",
        "model: {path: model, chat_template: template.jinja}",
    );
    assert_refused_until_accepted(folder.path(), "the model has another chat template");
}

#[test]
fn another_reward_script_is_a_warning() {
    let script = "import sys\nfor line in sys.stdin: print(1, flush=True)\n";
    let config = CONFIG
        .replace(
            "{kind: regex, pattern: '^[ab]'}",
            "{kind: program, command: [python3, reward.py]}",
        )
        .replace("max_steps: 12", "max_steps: 3");
    let folder = folder(&config);
    let path = folder.path().join("reward.py");
    fs::write(&path, script).unwrap();
    succeeds(folder.path(), &["train", "run.yaml"]);
    change(folder.path(), "max_steps: 3", "max_steps: 4");
    fs::write(&path, script.replace("print(1", "print(2")).unwrap();
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(
        said(&output).contains("the reward file reward.py is another one"),
        "{}",
        said(&output)
    );
}

#[test]
fn another_module_of_a_reward_script_is_a_warning() {
    let config = CONFIG
        .replace(
            "{kind: regex, pattern: '^[ab]'}",
            "{kind: program, command: [python3, rewards/main.py]}",
        )
        .replace("max_steps: 12", "max_steps: 3");
    let folder = folder(&config);
    let rewards = folder.path().join("rewards");
    fs::create_dir(&rewards).unwrap();
    let script =
        "import sys\nfrom rules import ONE\nfor line in sys.stdin: print(ONE, flush=True)\n";
    fs::write(rewards.join("main.py"), script).unwrap();
    fs::write(rewards.join("rules.py"), "ONE = 1\n").unwrap();
    succeeds(folder.path(), &["train", "run.yaml"]);
    change(folder.path(), "max_steps: 3", "max_steps: 4");
    fs::write(rewards.join("rules.py"), "ONE = 2\n").unwrap();
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(
        said(&output).contains("the reward file rewards/rules.py is another one"),
        "{}",
        said(&output)
    );
}

/// Another configuration with this one's name uses the same directory, unless it names its own.
#[test]
fn another_configuration_does_not_resume_the_run() {
    let folder = run();
    write_rows(&folder.path().join("other.jsonl"), &["abc", "d", "ee"]);
    for (from, to, key) in [
        (
            "prompts_per_step: 4",
            "prompts_per_step: 2",
            "prompts_per_step: 4, now 2",
        ),
        ("pattern: '^[ab]'", "pattern: '^[cd]'", "rewards: "),
        (
            "learning_rate: 3e-3",
            "learning_rate: 1e-3",
            "optimizer.learning_rate: 0.003, now 0.001",
        ),
        (
            "run_dir: run\n",
            "run_dir: run\nseed: 7\n",
            "seed: 0, now 7",
        ),
        ("train: data.jsonl", "train: other.jsonl", "data.train: "),
        (
            "train: data.jsonl",
            "train: data.jsonl, max_rows: 5",
            "data.max_rows: null, now 5",
        ),
        (
            "{every_steps: 4,",
            "{every_steps: 5,",
            "evaluation.every_steps: 4, now 5",
        ),
    ] {
        let config = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
        change(folder.path(), from, to);
        let refused = resume(folder.path(), &[]);
        assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
        for words in [
            "run directory run: started with different settings",
            key,
            "--accept-changes",
        ] {
            assert!(
                said(&refused).contains(words),
                "{words:?} in {}",
                said(&refused)
            );
        }
        assert_eq!(steps(folder.path()), 6);
        fs::write(folder.path().join("run.yaml"), config).unwrap();
    }
    change(folder.path(), "learning_rate: 3e-3", "learning_rate: 1e-3");
    assert_refused_until_accepted(folder.path(), "optimizer.learning_rate");
}

/// An earlier version had fewer keys.
#[test]
fn keys_that_the_run_did_not_write_are_unchanged_at_their_defaults() {
    let folder = run();
    let path = folder.path().join("run/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (section, key) in [
        ("/rewards/0", "weight"),
        ("/recipe", "group_filter"),
        ("", "old_log_probs"),
        ("", "environment"),
    ] {
        let section = config.pointer_mut(section).unwrap();
        let removed = section.as_object_mut().unwrap().remove(key);
        assert!(removed.is_some(), "{key}");
    }
    fs::write(&path, config.to_string()).unwrap();
    change(folder.path(), "kind: regex,", "kind: regex, weight: 0.5,");
    let refused = resume(folder.path(), &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    let words = "started with different settings: rewards: ";
    assert!(said(&refused).contains(words), "{}", said(&refused));

    change(folder.path(), "kind: regex, weight: 0.5,", "kind: regex,");
    let resumed = resume(folder.path(), &[]);
    assert_eq!(resumed.status.code(), Some(0), "{}", said(&resumed));
    assert!(!said(&resumed).contains("settings"), "{}", said(&resumed));
    assert_eq!(steps(folder.path()), 9);
}

/// An earlier version had the sections `algorithm`, `sampler` and `training`.
#[test]
fn a_run_of_an_earlier_version_resumes() {
    let folder = run();
    let path = folder.path().join("run/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let keys = config.as_object_mut().unwrap();
    let mut take = |key: &str| keys.remove(key).unwrap();
    let mut sampler = take("sampling");
    let response_length = sampler.as_object_mut().unwrap().remove("max_new_tokens");
    let algorithm = json!({
        "rollout_batch_size": take("prompts_per_step"),
        "num_return_sequences_in_group": take("num_generations"),
        "prompt_length": take("max_prompt_tokens"),
        "response_length": response_length,
        "ppo_epochs": take("epochs"),
        "recipe": take("recipe"),
    });
    let rows = take("demonstration_data");
    let training: Value = [
        "mini_batch_size",
        "demonstrations",
        "max_grad_norm",
        "critic",
    ]
    .into_iter()
    .map(|key| (key.to_owned(), take(key)))
    .collect();
    for (section, value) in [
        ("algorithm", algorithm),
        ("sampler", sampler),
        ("training", training),
        ("demonstrations", rows),
    ] {
        keys.insert(section.to_owned(), value);
    }
    fs::write(&path, config.to_string()).unwrap();
    let resumed = resume(folder.path(), &[]);
    assert_eq!(resumed.status.code(), Some(0), "{}", said(&resumed));
    assert!(!said(&resumed).contains("settings"), "{}", said(&resumed));
    assert_eq!(steps(folder.path()), 9);
}

#[test]
fn the_retention_of_checkpoints_may_change() {
    let folder = run();
    change(
        folder.path(),
        "checkpoint: {every_steps: 3}",
        "checkpoint: {every_steps: 1, keep: 1, keep_best: false}",
    );
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let checkpoints = candle_grpo::train::RunDir::checkpoints(&folder.path().join("run"));
    let steps: Vec<usize> = checkpoints
        .all()
        .unwrap()
        .iter()
        .map(|found| found.step)
        .collect();
    assert_eq!(steps, [9]);
}

#[test]
fn a_run_of_another_command_is_named() {
    let folder = run();
    let sft = "
model: model
data: {train: data.jsonl, text: '{prompt}'}
sft: {batch_size: 2}
max_steps: 2
run_dir: run
";
    fs::write(folder.path().join("sft.yaml"), sft).unwrap();
    let output = grpo(folder.path(), &["sft", "sft.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let words = "run directory run: has a grpo train run, must have a grpo sft run";
    assert!(said(&output).contains(words), "{}", said(&output));
}

#[test]
fn checkpoints_left_by_a_killed_program_are_removed() {
    let folder = run();
    change(folder.path(), "max_steps: 9", "max_steps: 6");
    let checkpoints = folder.path().join("run/checkpoints");
    // A checkpoint too many, and one that was being removed.
    let all = candle_grpo::train::RunDir::checkpoints(&folder.path().join("run"));
    let last = all.path(6);
    let copy = |to: &Path| {
        fs::create_dir(to).unwrap();
        for entry in fs::read_dir(&last).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    };
    copy(&all.path(1));
    copy(&all.path(2));
    copy(&checkpoints.join(".step-000003.77.old"));
    let output = resume(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let names: Vec<String> = fs::read_dir(&checkpoints)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
    let surplus = ["step-000001", "step-000002"];
    assert!(
        !names.iter().any(|name| surplus.contains(&name.as_str())),
        "{names:?}"
    );
    assert!(names.contains(&"step-000006".to_owned()), "{names:?}");
}
