//! Prompts that a chat template renders.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::models::write_reward_model;
use crate::support::{CONFIG, folder, grpo, lines, said, succeeds, without, write_model};

/// A configuration for message rows, whose model has the chat template `t.jinja`.
fn config(steps: usize) -> String {
    CONFIG
        .replace(
            "model: model",
            "model: {path: model, chat_template: t.jinja}",
        )
        .replace("held_out_rows: 4}", "held_out_rows: 1}")
        .replace(
            "checkpoint: {every_steps: 3}",
            "checkpoint: {every_steps: 1}",
        )
        .replace("max_steps: 12", &format!("max_steps: {steps}"))
        + "rollout_log: {every_steps: 1, max_groups: 100}\n"
}

fn write(folder: &Path, alphabet: &str, template: &str, rows: &[Value]) {
    write_model(&folder.join("model"), alphabet);
    fs::write(folder.join("t.jinja"), template).unwrap();
    let rows: String = rows.iter().map(|row| row.to_string() + "\n").collect();
    fs::write(folder.join("data.jsonl"), rows).unwrap();
}

fn asking(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn prompts(folder: &Path) -> Vec<String> {
    let rollouts = lines(&folder.join("run/rollouts.jsonl"));
    let prompts = rollouts.iter().map(|line| line["prompt"].as_str().unwrap());
    let mut prompts: Vec<String> = prompts.map(str::to_owned).collect();
    prompts.sort();
    prompts.dedup();
    prompts
}

/// All template texts show the same moment, to the microsecond.
#[test]
fn a_resumed_run_prints_the_time_of_its_first_start() {
    let folder = folder(&config(1));
    let path = folder.path();
    let rows: Vec<Value> = ["ab", "cd", "ea", "bc", "de"]
        .iter()
        .map(|text| json!({"messages": asking(text)}))
        .collect();
    let template = "{{ strftime_now('%S%f') }}{{ messages[0].content }}";
    write(path, "abcde0123456789", template, &rows);
    succeeds(path, &["train", "run.yaml"]);
    fs::write(path.join("run.yaml"), config(4)).unwrap();
    succeeds(path, &["train", "run.yaml", "--resume"]);
    let times = |prompts: Vec<String>| -> Vec<String> {
        let time = |prompt: &String| prompt.trim_end_matches(char::is_alphabetic).to_owned();
        let mut times: Vec<String> = prompts.iter().map(time).collect();
        times.dedup();
        times
    };
    let first = times(prompts(path));
    assert_eq!(first.len(), 1, "{first:?}");
    succeeds(path, &["train", "run.yaml", "--replace"]);
    let second = times(prompts(path));
    assert!(second.len() == 1 && second != first, "{first:?} {second:?}");
}

/// Its texts show one moment too.
#[test]
fn a_reward_model_of_a_resumed_run_reads_the_time_of_the_first_start() {
    let of_model = "rewards: [{kind: reward_model, path: scorer}]\nrun_dir";
    let config = |steps| without(&config(steps), "rewards").replacen("run_dir", of_model, 1);
    let folder = folder(&config(1));
    let path = folder.path();
    let rows = ["ab", "cd", "ea", "bc", "de"].map(|text| json!({"messages": asking(text)}));
    write(path, "abcde", "{{ messages[0].content }}", &rows);
    write_reward_model(&path.join("scorer"), "0123456789");
    let template = json!({"chat_template": "{{ strftime_now('%f%S') }}"});
    fs::write(
        path.join("scorer/tokenizer_config.json"),
        template.to_string(),
    )
    .unwrap();
    succeeds(path, &["train", "run.yaml"]);
    fs::write(path.join("run.yaml"), config(4)).unwrap();
    succeeds(path, &["train", "run.yaml", "--resume"]);
    let scores = || -> Vec<String> {
        let rollouts = lines(&path.join("run/rollouts.jsonl"));
        let mut scores: Vec<String> = rollouts
            .iter()
            .map(|line| line["reward"].to_string())
            .collect();
        scores.dedup();
        scores
    };
    let first = scores();
    assert_eq!(first.len(), 1, "{first:?}");
    succeeds(path, &["train", "run.yaml", "--replace"]);
    let second = scores();
    assert!(second.len() == 1 && second != first, "{first:?} {second:?}");
}

#[test]
fn rows_bring_tools_and_variables_of_the_template() {
    let folder = folder(&config(1));
    let path = folder.path();
    let row = |text: &str, more: Value| {
        let mut row = json!({"messages": asking(text)});
        row.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        row
    };
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let rows = [
        row(
            "a",
            json!({"tools": [tool, tool], "chat_template_kwargs": {"mode": "e"}}),
        ),
        row("b", json!({"tools": json!([tool]).to_string()})),
        row("c", json!({"tools": null, "chat_template_kwargs": null})),
        row("d", json!({"tools": []})),
    ];
    let template = "{{ (tools or []) | length }}{{ mode or 'c' }}{{ messages[0].content }}";
    write(path, "abcde012", template, &rows);
    let data = |more: &str| {
        let text = without(&config(1), "evaluation");
        let text = text.replace(", held_out_rows: 1", more);
        fs::write(path.join("run.yaml"), text).unwrap();
    };
    data(", chat_template_kwargs: {mode: b}");
    succeeds(path, &["train", "run.yaml"]);
    assert_eq!(prompts(path), ["0bc", "0bd", "1bb", "2ea"]);

    // A prompt that is a plain text has neither.
    let plain = [
        json!({"prompt": "ab", "tools": [tool]}),
        json!({"prompt": "c"}),
    ];
    write(path, "abcde012", template, &plain);
    data("");
    let output = grpo(path, &["train", "run.yaml", "--replace"]);
    let warning = "column \"tools\": not used in 1 rows, whose prompts are plain texts";
    assert!(said(&output).contains(warning), "{}", said(&output));

    // A column of that name may be something else.
    let other = [row("a", json!({"tools": "f"})), row("b", json!({}))];
    write(path, "abcde012", template, &other);
    let output = grpo(path, &["check", "run.yaml"]);
    let warning = "column \"tools\": not used in 1 rows, as it is not a list of tool schemas";
    assert!(said(&output).contains(warning), "{}", said(&output));
}
