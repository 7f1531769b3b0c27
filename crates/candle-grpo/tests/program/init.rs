//! `grpo init`.

use std::fs;

use rstest::rstest;

use super::models::chat_model;
use super::support::{grpo, said, succeeds};

#[rstest]
#[case("math", "train")]
#[case("program", "train")]
#[case("environment", "train")]
#[case("sft", "sft")]
fn a_written_task_is_valid_and_trains(#[case] task: &str, #[case] command: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chat_model(&folder.join("model"), 1024);
    let printed = succeeds(folder, &["init", task, "tasks/own", "--model", "model"]);
    assert!(printed.starts_with("tasks/own/run.yaml\n"), "{printed}");
    let checked = succeeds(folder, &["check", "tasks/own/run.yaml"]);
    assert!(checked.contains("tasks/own/run.yaml: valid"), "{checked}");

    let path = folder.join("tasks/own/run.yaml");
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace("epochs: 3", "max_steps: 1");
    let steps = text.find("\nmax_steps: ").unwrap() + 1;
    let end = steps + text[steps..].find('\n').unwrap();
    let short = format!("{}max_steps: 1\nthreads: 1{}", &text[..steps], &text[end..]);
    let short = short
        .replace("decay_until: 100", "decay_until: 9")
        .replace("max_new_tokens: 256", "max_new_tokens: 16");
    fs::write(&path, short.replace("every_steps: 10", "every_steps: 1")).unwrap();
    succeeds(folder, &[command, "tasks/own/run.yaml", "--quiet"]);
    assert!(folder.join("runs/own/metrics.jsonl").is_file());
}

#[test]
fn an_existing_file_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("program")).unwrap();
    fs::write(folder.join("program/reward.py"), "mine").unwrap();
    let output = grpo(folder, &["init", "program"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(
        said(&output).contains("program/reward.py: already exists and is not replaced"),
        "{}",
        said(&output)
    );
    let entries = fs::read_dir(folder.join("program")).unwrap().count();
    assert_eq!(entries, 1);
    assert_eq!(
        fs::read_to_string(folder.join("program/reward.py")).unwrap(),
        "mine"
    );
    let output = grpo(folder, &["init", "math", "--model", "a\"b"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(!folder.join("math/run.yaml").exists());
}
