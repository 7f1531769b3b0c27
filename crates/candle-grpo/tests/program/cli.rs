//! The command line: checks, messages and exit codes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const CONFIG: &str = "\
model: model
data: {train: data.jsonl, held_out_rows: 1}
rewards: [{kind: numeric}]
algorithm: {preset: dapo, rollout_batch_size: 2, response_length: 8}
";

/// A folder with a configuration, data and a model.
fn folder(config: &str, data: &str) -> TempDir {
    let folder = crate::support::folder(config);
    fs::write(folder.path().join("data.jsonl"), data).unwrap();
    folder
}

const DATA: &str = "{\"prompt\": \"ab\", \"answer\": \"2\"}\n{\"prompt\": \"cd\", \"answer\": 3}\n";

fn grpo(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_grpo"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that the program fails with this code and these words.
fn fails(output: &Output, code: i32, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(words), "{said}");
}

#[test]
fn check_prints_a_configuration_that_it_accepts() {
    let folder = folder(CONFIG, DATA);
    let first = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(
        first.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&first.stderr)
    );
    assert!(out(&first).contains("1 prompts to train on, 1 held out"));
    fs::write(folder.path().join("again.yaml"), out(&first)).unwrap();
    let second = grpo(folder.path(), &["check", "again.yaml"]);
    let settings = |output: &Output| -> String {
        out(output)
            .lines()
            .skip(1)
            .map(|line| format!("{line}\n"))
            .collect()
    };
    assert_eq!(settings(&second), settings(&first));
    let quiet = grpo(folder.path(), &["check", "--quiet", "run.yaml"]);
    assert_eq!((quiet.status.code(), out(&quiet).as_str()), (Some(0), ""));
}

#[test]
fn each_kind_of_error_has_its_exit_code() {
    let there = folder(CONFIG, DATA);
    fails(&grpo(there.path(), &[]), 2, "Usage");
    fails(&grpo(there.path(), &["chekc", "run.yaml"]), 2, "check");
    fails(
        &grpo(there.path(), &["check", "none.yaml"]),
        3,
        "none.yaml: cannot be read",
    );
    let wrong = folder(&CONFIG.replace("preset: dapo", "preset: dppo"), DATA);
    fails(
        &grpo(wrong.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:4: algorithm.preset",
    );
    let wrong = folder(CONFIG, "{\"question\": 7}\n{}\n");
    fails(&grpo(wrong.path(), &["check", "run.yaml"]), 4, "data.jsonl");
    let wrong = folder(CONFIG, &DATA.replace("3", "\"three\""));
    fails(
        &grpo(wrong.path(), &["check", "run.yaml"]),
        4,
        "data.jsonl:2: reward \"numeric\": column \"answer\": \"three\"",
    );
    fs::remove_dir_all(there.path().join("model")).unwrap();
    fails(
        &grpo(there.path(), &["check", "run.yaml"]),
        5,
        "model: there is no such file",
    );
}

#[test]
fn help_lists_commands_and_exit_codes() {
    let folder = folder(CONFIG, DATA);
    let help = out(&grpo(folder.path(), &["--help"]));
    for words in [
        "check",
        "completions",
        "Exit codes:",
        "3  wrong configuration",
    ] {
        assert!(help.contains(words), "{words:?} in\n{help}");
    }
    let help = out(&grpo(folder.path(), &["check", "--help"]));
    assert!(help.contains("docs/configuration.md"), "{help}");
}

#[test]
fn completions_prints_a_script_for_each_shell() {
    let folder = folder(CONFIG, DATA);
    for (shell, words) in [
        ("bash", "complete -F _grpo"),
        ("zsh", "#compdef grpo"),
        ("fish", "complete -c grpo"),
    ] {
        let script = grpo(folder.path(), &["completions", shell]);
        assert!(out(&script).contains(words), "{shell}");
    }
}

#[test]
fn check_explains_each_key_of_a_roll_file() {
    let config = "\
pretrain: model
rollout_batch_size: 2
response_length: 8
actor_train:
  strategy_args: {strategy_name: deepspeed}
  data_args: {file_name: data.jsonl}
rewards: [{kind: numeric}]
";
    let folder = folder(config, DATA);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = out(&output);
    assert!(
        text.contains("used: algorithm.rollout_batch_size"),
        "{text}"
    );
    assert!(
        text.contains("no meaning here: there are no strategies"),
        "{text}"
    );
}

/// Asserts that `check` and `train` refuse a configuration with exit code 3 and these words.
fn both_refuse(folder: &Path, config: &str, words: &str) {
    fs::write(folder.join("run.yaml"), config).unwrap();
    for command in ["check", "train"] {
        fails(&grpo(folder, &[command, "run.yaml"]), 3, words);
    }
    assert!(!folder.join("runs").exists());
}

#[test]
fn check_refuses_what_train_refuses() {
    let folder = folder(CONFIG, DATA);
    let path = folder.path();
    let with = |from: &str, to: &str| {
        assert!(CONFIG.contains(from));
        CONFIG.replace(from, to)
    };
    let reward = |reward: &str| with("{kind: numeric}", reward);
    for (config, words) in [
        (
            reward("{kind: program, command: [no-such-program]}"),
            "run.yaml:3: rewards[0]: command: \"no-such-program\", there is no such program in PATH",
        ),
        (
            reward("{kind: program, command: [python3, reward.py]}"),
            "reward.py, there is no such file",
        ),
        (
            reward("{kind: program, command: [sh, a.sh], folder: none}"),
            "run.yaml:3: rewards[0]: folder: none, must be a folder",
        ),
        (
            with("response_length: 8", "response_length: 24"),
            "run.yaml:4: algorithm.response_length: 24, must be at most 22: the model has 24 positions",
        ),
        (
            format!("{CONFIG}evaluation: {{sampler: {{max_new_tokens: 99}}}}\n"),
            "run.yaml:5: evaluation.sampler.max_new_tokens: 99, must be at most 22",
        ),
        (
            format!(
                "{CONFIG}training: {{adapters: {{rank: 2, alpha: 4, target_modules: [nose]}}}}\n"
            ),
            "run.yaml:5: training.adapters: ",
        ),
        (
            format!("{CONFIG}optimizer: {{learning_rate: -1}}\n"),
            "run.yaml:5: optimizer.learning_rate: -1, must be finite and at least 0",
        ),
        (
            format!("{CONFIG}run_dir: model\n"),
            "run.yaml:1: model: model, must lie outside of run_dir, model",
        ),
        (
            format!("{CONFIG}run_dir: ''\n"),
            "run.yaml:5: run_dir: \"\"",
        ),
        (
            format!("{CONFIG}threads: 100000\n"),
            "run.yaml:5: threads: 100000, must be at most 1024",
        ),
    ] {
        both_refuse(path, &config, words);
    }
}

#[test]
fn errors_have_no_backtrace() {
    let folder = folder(
        &CONFIG.replace("preset: dapo", "preset: dapo, pg_clip: 7"),
        DATA,
    );
    fs::write(folder.path().join("model/config.json"), "{}").unwrap();
    for command in [
        &["check", "run.yaml"][..],
        &["train", "run.yaml"],
        &["sample", "model", "hello"],
        &["convert", "model", "other"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_grpo"))
            .current_dir(folder.path())
            .args(command)
            .env("RUST_BACKTRACE", "full")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(
            said.lines().count() <= 3 && !said.contains("backtrace"),
            "{said}"
        );
        assert!(!said.contains(".rs"), "{said}");
    }
}

#[test]
fn a_flat_page_of_rolls_keys_is_recognized() {
    let config = "\
model: model
data: {train: data.jsonl}
rewards: [{kind: numeric}]
rollout_batch_size: 2
num_return_sequences_in_group: 4
response_length: 8
adv_estimator: grpo
";
    let folder = folder(config, DATA);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    let text = out(&output);
    assert!(
        text.contains("used: algorithm.rollout_batch_size"),
        "{text}"
    );
    assert!(text.contains("8 completions a step"), "{text}");
    // An error names the key as the file has it.
    let wrong = config.replace("rollout_batch_size: 2", "rollout_batch_size: 0");
    fs::write(folder.path().join("run.yaml"), wrong).unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:4: rollout_batch_size: 0, must be at least 1",
    );
    // A key or two of the section at the top are a slip.
    let config = CONFIG.replace(
        "algorithm: {preset: dapo, rollout_batch_size: 2, ",
        "algorithm: {",
    );
    let config = format!("{config}rollout_batch_size: 2\n");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        3,
        "run.yaml:5: rollout_batch_size: unknown key; here it is algorithm.rollout_batch_size",
    );
}

#[test]
fn keys_of_roll_that_are_ignored_are_warned_of() {
    let config = "\
pretrain: model
response_length: 8
length_loss_weight: true
actor_train: {data_args: {file_name: data.jsonl}}
rewards: [{kind: numeric}]
";
    let folder = folder(config, DATA);
    let output = grpo(folder.path(), &["check", "--quiet", "run.yaml"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("warning: run.yaml:3: length_loss_weight: not supported and ignored"),
        "{said}"
    );
}

#[test]
fn sample_refuses_an_empty_prompt() {
    let folder = crate::support::folder(CONFIG);
    for prompt in ["", "  \n"] {
        fails(
            &grpo(folder.path(), &["sample", "model", prompt]),
            3,
            "the prompt is empty",
        );
    }
}

#[test]
fn check_refuses_content_that_is_not_text() {
    let content =
        r#"[{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": "a.png"}]"#;
    let row = format!(r#"{{"messages": [{{"role": "user", "content": {content}}}], "answer": 1}}"#);
    let folder = folder(CONFIG, &format!("{row}\n{row}\n"));
    for command in ["check", "train"] {
        fails(
            &grpo(folder.path(), &[command, "run.yaml"]),
            4,
            "message 0: the content has a part of type \"image_url\", must be text",
        );
    }
}
