//! `grpo sample` and `grpo chat`, and chat template variables.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use candle_grpo::config::RunConfig;
use candle_grpo::run::{RunPrompts, load_model_without_weights};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::models::chat_model;
use super::support::{command, grpo, said, succeeds};

const CONFIG: &str = "
model: model
data: {train: data.jsonl, prompt: 'say {word}', system: Be, prefill: 'so {word}', chat_template_kwargs: {enable_thinking: true}}
rewards: [{kind: regex, pattern: '^[ab]'}]
prompts_per_step: 1
num_generations: 2
sampling: {max_new_tokens: 4}
evaluation: {sampler: {max_new_tokens: 7}}
max_steps: 1
run_dir: run
threads: 1
";

/// A folder with a model that has a chat template.
fn with_model(positions: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    chat_model(&folder.path().join("model"), positions);
    folder
}

fn with_config(config: &str) -> TempDir {
    let folder = with_model(256);
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let rows = "{\"word\": \"ab\"}\n{\"word\": \"cd\"}\n";
    fs::write(folder.path().join("data.jsonl"), rows).unwrap();
    folder
}

fn sample(folder: &Path, arguments: &[&str]) -> String {
    let always = ["sample", "model", "--quiet", "--max-new-tokens", "8"];
    succeeds(folder, &[&always[..], arguments].concat())
}

/// Runs `grpo chat` with this input.
fn chat(folder: &Path, arguments: &[&str], input: impl AsRef<[u8]>) -> Output {
    let always = ["chat", "model", "--quiet", "--max-new-tokens", "8"];
    let mut command = command(folder, &[&always[..], arguments].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_ref()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

#[test]
fn a_conversation_keeps_its_messages_until_it_is_reset() {
    let folder = with_model(256);
    let folder = folder.path();
    let output = chat(folder, &[], "hi\n\nand?\n/reset\nhi\n/exit\nhi\n");
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<&str> = answers.split_terminator('\n').collect();
    let raw = |prompt: &str| sample(folder, &["--raw", prompt]);
    let first = raw("user: hi|assistant: ");
    let first = first.strip_suffix('\n').unwrap();
    let more = format!("user: hi|assistant: {first}|user: and?|assistant: ");
    let second = raw(&more);
    assert_eq!(answers, [first, second.strip_suffix('\n').unwrap(), first]);

    let output = chat(folder, &["--system", "Be"], "hi\n");
    let answer = String::from_utf8(output.stdout).unwrap();
    assert_eq!(answer, raw("system: Be|user: hi|assistant: "));
    let variables = ["--chat-template-kwargs", "{\"enable_thinking\": true}"];
    let output = chat(folder, &variables, "hi\n");
    let answer = String::from_utf8(output.stdout).unwrap();
    assert_eq!(answer, raw("user: hi|think|assistant: "));
}

#[test]
fn a_line_that_is_not_utf_8_does_not_end_the_conversation() {
    let folder = with_model(256);
    let output = chat(folder.path(), &[], b"\xff\n/reset\nhi\n");
    assert!(
        said(&output).contains("warning: the line is not UTF-8"),
        "{}",
        said(&output)
    );
    // The tokens of this model are ASCII characters.
    assert!(
        said(&output).contains("has no token for a part of it"),
        "{}",
        said(&output)
    );
    let output = chat(folder.path(), &[], "hi \u{fffd}\n");
    assert!(!said(&output).contains("not UTF-8"), "{}", said(&output));
}

#[test]
fn a_conversation_that_cannot_go_on_is_an_error_in_a_script() {
    let folder = with_model(40);
    let long = "a".repeat(40);
    let output = chat(folder.path(), &[], format!("hi\n{long}\n"));
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains("positions; /reset starts a new one"));
    let folder = super::support::folder(super::support::CONFIG);
    let output = chat(folder.path(), &[], "ab\n");
    assert_eq!(output.status.code(), Some(5), "{}", said(&output));
    assert!(said(&output).contains("the model has no chat template"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_and_not_the_conversation() {
    use std::io::Read;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let folder = with_model(1_000_000);
    // An answer without a stop token does not end by itself.
    let file = folder.path().join("model/generation_config.json");
    fs::write(file, "{\"eos_token_id\": []}").unwrap();
    let arguments = ["chat", "model", "--quiet", "--max-new-tokens", "900000"];
    let mut command = command(folder.path(), &arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "hello").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 2]).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    writeln!(stdin, "/exit").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(rest.ends_with('\n'));
}

#[test]
fn sampling_is_that_of_the_model_unless_an_option_is_given() {
    let folder = with_model(256);
    let folder = folder.path();
    let greedy = sample(folder, &["hi"]);
    assert_eq!(greedy, sample(folder, &["hi", "--temperature", "0"]));
    let warm = ["hi", "--seed", "1", "--temperature", "0.7", "--top-k", "40"];
    let expected = sample(folder, &warm);
    assert_ne!(greedy, expected);
    // Several answers are sampled.
    let several = sample(folder, &["hi", "-n", "2"]);
    assert_eq!(
        several,
        sample(folder, &["hi", "-n", "2", "--temperature", "1"])
    );

    let path = folder.join("model/generation_config.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let more =
        json!({"do_sample": true, "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1});
    for (key, value) in more.as_object().unwrap() {
        file[key] = value.clone();
    }
    fs::write(&path, file.to_string()).unwrap();
    assert_eq!(sample(folder, &["hi", "--seed", "1"]), expected);
    assert_eq!(sample(folder, &["hi", "--temperature", "0"]), greedy);
    let output = grpo(folder, &["sample", "model", "hi"]);
    assert!(
        said(&output).contains("not applied: repetition_penalty: 1.1"),
        "{}",
        said(&output)
    );
    // A model keeps the recommendation.
    succeeds(folder, &["convert", "model", "copy"]);
    let copy = fs::read(folder.join("copy/generation_config.json")).unwrap();
    let copy: Value = serde_json::from_slice(&copy).unwrap();
    assert_eq!(copy["temperature"], 0.7);
}

#[test]
fn a_row_has_the_prompt_of_its_run() {
    let folder = with_config(CONFIG);
    let folder = folder.path();
    succeeds(folder, &["train", "run.yaml", "--quiet"]);
    let row = succeeds(
        folder,
        &["sample", "run", "--quiet", "--row", "{\"word\": \"xy\"}"],
    );
    let prompt = "system: Be|user: say xy|think|assistant: so xy";
    let raw = [
        "sample",
        "run",
        "--quiet",
        "--raw",
        prompt,
        "--max-new-tokens",
        "7",
    ];
    assert_eq!(row, succeeds(folder, &raw));
    for (arguments, code, words) in [
        (
            ["run", "--row", "{\"other\": 1}"],
            3,
            "error: --row:1: column \"word\"",
        ),
        (
            ["model", "--row", "{}"],
            3,
            "--row: model is not a run directory",
        ),
        (["run", "--row", "[]"], 2, "must be a JSON object"),
    ] {
        let output = grpo(folder, &[&["sample"][..], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}

#[test]
fn prompts_have_the_variables_of_the_data() {
    let folder = with_config(CONFIG);
    let path = |text: &str| {
        text.replace(
            ": model",
            &format!(": {}", folder.path().join("model").display()),
        )
    };
    let data = folder.path().join("data.jsonl");
    let text = path(CONFIG).replace("data.jsonl", &data.display().to_string());
    for (text, expected) in [
        (
            text.clone(),
            "system: Be|user: say ab|think|assistant: so ab",
        ),
        (
            text.replace("enable_thinking: true", ""),
            "system: Be|user: say ab|assistant: so ab",
        ),
    ] {
        fs::write(folder.path().join("x.yaml"), text).unwrap();
        let run = RunConfig::read(&folder.path().join("x.yaml")).unwrap();
        let model = load_model_without_weights(&run).unwrap();
        let (_, prompts) = RunPrompts::read(&run, &model).unwrap();
        assert_eq!(prompts.train[0].text, expected);
    }
}

#[rstest]
#[case(
    "{enable_thinking: true}",
    "3",
    "run.yaml:3: data.chat_template_kwargs: "
)]
#[case(
    "{enable_thinking: true}",
    "{enable_thinkin: 1, x_y: 2}",
    "run.yaml:3: data.chat_template_kwargs.x_y: given, but the chat template has no such variable"
)]
#[case(
    "{enable_thinking: true}",
    "{messages: []}",
    "run.yaml:3: data.chat_template_kwargs.messages: given, must be absent: the prompt sets it"
)]
fn variables_that_do_not_fit_are_errors_with_their_line(
    #[case] valid: &str,
    #[case] wrong: &str,
    #[case] words: &str,
) {
    let folder = with_config(&CONFIG.replace(valid, wrong));
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}
