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
            "run.yaml:5: threads: 100000, must be at most 1024; their stacks take 195 GiB",
        ),
        (
            format!("{CONFIG}training: {{adapters: {{rank: 17, alpha: 4}}}}\n"),
            "run.yaml:5: training.adapters.rank: 17, must be at most 16, the width of the model; the adapters take ",
        ),
        (
            format!("{CONFIG}evaluation: {{samples_per_prompt: 2000000}}\n"),
            "run.yaml:5: evaluation.samples_per_prompt: 2000000, must make at most 1048576 completions; 2000000 completions of up to 8 tokens for each of 1 prompts take 610 MiB",
        ),
        (
            format!("{CONFIG}max_steps: 2000000000000\n"),
            "run.yaml:5: max_steps: 2000000000000, must be at most 1099511627776; with one byte each they take 2 TiB",
        ),
        (
            format!("{CONFIG}training: {{max_sampling_batches: 1000000000}}\n"),
            "run.yaml:5: training.max_sampling_batches: 1000000000, must take at most 1 TiB a step",
        ),
        (
            with("held_out_rows: 1", "held_out_rows: 2"),
            "run.yaml:2: data.held_out_rows: 2, must be less than the 2 rows of train",
        ),
        (
            with("preset: dapo", "preset: dapo, prompt_length: 1"),
            "run.yaml:4: algorithm.prompt_length: 1, must be at least 2",
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

/// One row is held out of two, so the number of samples alone is within its bound.
#[test]
fn the_completions_of_an_evaluation_are_bounded() {
    let rows: String = (0..9)
        .map(|i| {
            format!(
                "{{\"prompt\": \"{}\", \"answer\": {i}}}\n",
                "a".repeat(i + 1)
            )
        })
        .collect();
    let config = CONFIG.replace("held_out_rows: 1", "held_out_rows: 4")
        + "evaluation: {samples_per_prompt: 300000}\n";
    let folder = folder(&config, &rows);
    for command in ["check", "train", "eval"] {
        fails(
            &grpo(folder.path(), &[command, "run.yaml"]),
            3,
            "run.yaml:5: evaluation.samples_per_prompt: 300000, must make at most 1048576 completions; 300000 completions of up to 8 tokens for each of 4 prompts take 366 MiB",
        );
    }
}

#[test]
fn check_refuses_a_model_without_whole_weights() {
    let folder = folder(CONFIG, DATA);
    let weights = folder.path().join("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for (bytes, words) in [
        (None, "model.safetensors"),
        (
            Some(&whole[..whole.len() - 4]),
            "bytes of tensors, must have",
        ),
        (Some(&whole[..99]), "a header of"),
    ] {
        match bytes {
            Some(bytes) => fs::write(&weights, bytes).unwrap(),
            None => fs::remove_file(&weights).unwrap(),
        }
        for command in ["check", "train"] {
            fails(&grpo(folder.path(), &[command, "run.yaml"]), 5, words);
        }
    }
    fs::write(&weights, &whole).unwrap();
    let config = folder.path().join("model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        text.replace("\"intermediate_size\": ", "\"intermediate_size\": 1"),
    )
    .unwrap();
    fails(&grpo(folder.path(), &["check", "run.yaml"]), 5, "mlp.");
}

#[test]
fn check_warns_of_prompts_that_are_left_out() {
    let data = format!("{DATA}{{\"prompt\": \"abcde\", \"answer\": 1}}\n");
    let config = CONFIG.replace("held_out_rows: 1}", "}");
    let folder = folder(
        &config.replace("preset: dapo", "preset: dapo, prompt_length: 3"),
        &data,
    );
    let output = grpo(folder.path(), &["check", "--quiet", "run.yaml"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("1 of 3 prompts have more than 3 tokens, up to 5, and are left out"),
        "{said}"
    );
}

#[test]
fn a_wrong_option_of_sample_is_named() {
    let folder = crate::support::folder(CONFIG);
    for (option, value, words) in [
        (
            "--temperature",
            "-1",
            "--temperature: -1, must be finite and at least 0",
        ),
        ("--temperature", "nan", "--temperature: NaN, must "),
        ("--top-p", "0", "--top-p: 0, must "),
        ("--min-p", "-0.5", "--min-p: -0.5, must "),
        ("--max-new-tokens", "0", "--max-new-tokens: 0, must "),
        (
            "--max-new-tokens",
            "23",
            "--max-new-tokens: 23, must be at most 22: the model has 24 positions, and the prompt 2 tokens",
        ),
        ("--stop", "", "--stop: "),
    ] {
        fails(
            &grpo(folder.path(), &["sample", "model", "ab", option, value]),
            3,
            words,
        );
    }
}

/// Only the completions of the evaluation are too long.
#[test]
fn eval_refuses_completions_longer_than_the_model() {
    let folder = folder(
        &format!("{CONFIG}evaluation: {{sampler: {{max_new_tokens: 99}}}}\n"),
        DATA,
    );
    fails(
        &grpo(folder.path(), &["eval", "run.yaml"]),
        3,
        "run.yaml:5: evaluation.sampler.max_new_tokens: 99, must be at most 22",
    );
}

#[test]
fn messages_about_syntax_have_no_words_of_libraries() {
    let folder = folder(CONFIG, DATA);
    for (text, words) in [
        ("model: [a\n", ":1: not valid YAML: a bracket is not closed"),
        (
            "a: b: c\n",
            ":1: not valid YAML: a second colon on a line, or a wrong indentation",
        ),
        (
            "a: 1\n---\nb: 2\n",
            ":3: not valid YAML: a second document begins, must be one",
        ),
        (
            "? [a]\n: b\n",
            ":1: not valid YAML: a key is a list or a mapping, must be a text",
        ),
        (
            "null: 3\n",
            ":1: not valid YAML: a key is null, must be a text",
        ),
        (
            "a: &x [*x]\n",
            ":1: not valid YAML: an alias is part of its own value",
        ),
        ("a: *x\n", ":1: not valid YAML: an alias has no anchor"),
        (
            "a: !!int x\n",
            ":1: not valid YAML: a value must be of the type of its tag",
        ),
        ("a: .nan\n", ":1: .nan, must be finite"),
        (
            "a.b: 1\n",
            "key \"a.b\", must have no dots and brackets in it",
        ),
    ] {
        fs::write(folder.path().join("run.yaml"), text).unwrap();
        fails(&grpo(folder.path(), &["check", "run.yaml"]), 3, words);
    }
    fs::write(folder.path().join("run.yaml"), CONFIG).unwrap();
    fs::write(folder.path().join("data.jsonl"), "{\"prompt\" \"a\"}\n").unwrap();
    fails(
        &grpo(folder.path(), &["check", "run.yaml"]),
        4,
        "data.jsonl:1: must be a JSON object: there must be a colon at column 11",
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
            3,
            ": column \"messages\": message 0: content: a part of type \"image_url\", must be text",
        );
    }
}
