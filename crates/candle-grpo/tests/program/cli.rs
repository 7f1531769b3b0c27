//! The program as a person runs it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const CONFIG: &str = "\
model: model
data: {train: data.jsonl, held_out_rows: 1}
rewards: [{kind: numeric}]
algorithm: {preset: dapo, rollout_batch_size: 2}
";

/// A folder with a configuration, data and something in place of a model.
fn folder(config: &str, data: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("model")).unwrap();
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    fs::write(folder.path().join("data.jsonl"), data).unwrap();
    folder
}

const DATA: &str =
    "{\"question\": \"1+1?\", \"answer\": \"2\"}\n{\"question\": \"1+2?\", \"answer\": 3}\n";

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

/// That the program fails with this code and says this.
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
fn exit_codes() {
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
    fs::remove_dir(there.path().join("model")).unwrap();
    fails(
        &grpo(there.path(), &["check", "run.yaml"]),
        5,
        "model: there is no such file",
    );
}

#[test]
fn help_says_what_there_is() {
    let folder = folder(CONFIG, DATA);
    let help = out(&grpo(folder.path(), &["--help"]));
    for words in [
        "check",
        "completions",
        "Exit codes:",
        "3  the configuration is wrong",
    ] {
        assert!(help.contains(words), "{words:?} in\n{help}");
    }
    let help = out(&grpo(folder.path(), &["check", "--help"]));
    assert!(help.contains("docs/configuration.md"), "{help}");
}

#[test]
fn completions_are_scripts_of_the_shell() {
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
fn a_file_of_roll_is_explained() {
    let config = "\
pretrain: model
rollout_batch_size: 2
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
