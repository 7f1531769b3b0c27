//! Errors that used to go unnoticed: wrong scores, prompts that tell the answer, weights that are
//! not finite.

use std::fs;
use std::time::Instant;

use candle_grpo::train::RunDir;
use candle_grpo_test_support::{Lines, WATCHDOG};
use rstest::rstest;

use super::running::Running;
use super::support::{CONFIG, command, folder, grpo, lines, said, without};

/// The configuration with the program `reward.py`, which is `script`.
fn with_program(script: &str) -> tempfile::TempDir {
    let reward = "{kind: program, command: [python3, reward.py], time_limit_seconds: 600}";
    let folder = folder(&CONFIG.replace("{kind: regex, pattern: '^[ab]'}", reward));
    fs::write(folder.path().join("reward.py"), script).unwrap();
    folder
}

/// A print that was forgotten: once, in each answer, at the start, at the end.
#[rstest]
#[case::once("print(1, flush=True)\n        if i == 10: print(7, flush=True)")]
#[case::always("print(7, flush=True); print(1, flush=True)")]
#[case::at_the_end("print(1, flush=True)\nprint(7, flush=True)")]
fn an_additional_line_of_a_reward_program_ends_the_run_with_an_error(#[case] answer: &str) {
    let folder = with_program(&format!(
        "import sys\nif True:\n    for i, line in enumerate(sys.stdin):\n        {answer}\n"
    ));
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("after the last answer of a batch"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_missing_reward_script_is_an_error_of_the_configuration() {
    let folder = with_program("");
    fs::remove_file(folder.path().join("reward.py")).unwrap();
    for command in ["check", "train", "eval"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(
            said(&output).contains("rewards[0].command: reward.py, must be a file that exists"),
            "{}",
            said(&output)
        );
    }
}

/// Starts a child, reports that both run once it is asked, and never answers.
const HANGING: &str = "
import os, subprocess, sys, time
witness = os.open('witness', os.O_WRONLY)
subprocess.Popen(['sleep', '600'], pass_fds=[witness])
sys.stdin.readline()
os.write(witness, b'both run\\n')
time.sleep(600)
";

#[cfg(target_os = "linux")]
#[rstest]
#[case::killed("SIGKILL", None)]
#[case::asked_to_stop("SIGINT", Some(7))]
fn a_hanging_reward_program_ends_with_the_run(#[case] signal: &str, #[case] code: Option<i32>) {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let folder = with_program(HANGING);
    let witness = Lines::of_named_pipe(&folder.path().join("witness"));
    let run = Running::start(command(folder.path(), &["train", "run.yaml"]));
    witness.line();
    let begun = Instant::now();
    let signal: Signal = signal.parse().unwrap();
    kill(Pid::from_raw(run.id() as i32), signal).unwrap();
    let (status, errors) = run.end();
    // The time limit of the reward is ten minutes.
    assert!(begun.elapsed() < WATCHDOG);
    assert_eq!(status.code(), code, "{errors}");
    witness.wait_for_end();
}

#[test]
fn a_conversation_that_ends_with_the_answer_is_an_error_of_the_data() {
    let config = CONFIG.replace(
        "model: model",
        "model: {path: model, chat_template: template}",
    );
    let folder = folder(&config);
    fs::write(
        folder.path().join("template"),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    .unwrap();
    let rows: String = ["ab", "cd", "ea", "bc", "de", "ac"]
        .iter()
        .map(|text| {
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{text}\"}}, {{\"role\": \"assistant\", \"content\": \"e\"}}]}}\n"
            )
        })
        .collect();
    fs::write(folder.path().join("data.jsonl"), rows).unwrap();
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(4), "{}", said(&output));
        assert!(
            said(&output).contains("data.jsonl:1: "),
            "{}",
            said(&output)
        );
        assert!(
            said(&output).contains("data.cut_answer"),
            "{}",
            said(&output)
        );
    }
    let config = config.replace("data: {", "data: {cut_answer: true, ");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let samples = lines(&folder.path().join("run/samples.jsonl"));
    assert!(
        samples
            .iter()
            .all(|line| line["prompt"].as_str().unwrap().len() == 2)
    );
}

#[test]
fn a_chat_template_that_renders_all_rows_alike_is_an_error_of_the_data() {
    let config = CONFIG
        .replace(
            "model: model",
            "model: {path: model, chat_template: template}",
        )
        .replace("data: {", "data: {chat: true, ");
    let folder = folder(&config);
    fs::write(folder.path().join("template"), "abc").unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(
        said(&output).contains("chat template: renders all 6 rows alike, as \"abc\""),
        "{}",
        said(&output)
    );
}

#[test]
fn rows_that_are_trained_on_and_held_out_are_a_warning_or_an_error() {
    let config = CONFIG.replace("held_out_rows: 4", "held_out: held_out.jsonl");
    let folder = folder(&config);
    let held_out = folder.path().join("held_out.jsonl");
    fs::write(&held_out, "{\"prompt\": \"cab\"}\n{\"prompt\": \"abc\"}\n").unwrap();
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        assert!(
            said(&output).contains("1 of 2 held-out rows ask the same as training rows"),
            "{}",
            said(&output)
        );
    }
    fs::write(&held_out, "{\"prompt\": \"ee\"}\n{\"prompt\": \"abc\"}\n").unwrap();
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(4), "{}", said(&output));
        assert!(
            said(&output).contains("error: data.held_out: all 2 rows"),
            "{}",
            said(&output)
        );
    }
}

/// A learning rate that drives the weights out of the f32 range. The last checkpoint before stays.
#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let config = CONFIG
        .replace(
            "every_steps: 3}",
            "every_steps: 1, keep: 1, keep_best: false}",
        )
        .replace("max_steps: 12", "max_steps: 2");
    let folder = folder(&config);
    let run = folder.path().join("run");
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let config = config
        .replace(
            "learning_rate: 3e-3",
            "learning_rate: 3e38, weight_decay: 1",
        )
        .replace("max_steps: 2", "max_steps: 6");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let output = grpo(
        folder.path(),
        &["train", "run.yaml", "--resume", "--accept-changes"],
    );
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert!(said(&output).contains("not finite"), "{}", said(&output));
    let checkpoints = RunDir::checkpoints(&run);
    let steps: Vec<usize> = checkpoints.all().unwrap().iter().map(|c| c.step).collect();
    assert_eq!(steps.len(), 1, "{steps:?}");
    let latest = checkpoints.latest().unwrap().checkpoint.unwrap();
    let model = candle_grpo::train::Pretrained::load(&latest.path, &candle_core::Device::Cpu);
    for (name, weight) in model.unwrap().parameters.iter() {
        let sum = weight
            .abs()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        assert!(sum.is_finite(), "{name}");
    }
}

/// Base and adapters are finite, and no f32 holds their sum.
#[test]
fn adapters_whose_merged_weights_are_not_finite_are_not_saved() {
    let config = CONFIG
        .replace("every_steps: 3}", "every_steps: 1}")
        .replace(
            "learning_rate: 3e-3}",
            "learning_rate: 1e37, weight_decay: 0}\nadapters: {rank: 2, alpha: 6400}",
        );
    let folder = folder(&config);
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert!(
        said(&output).contains("merged weight model.layers."),
        "{}",
        said(&output)
    );
    let checkpoints = RunDir::checkpoints(&folder.path().join("run"));
    assert!(checkpoints.all().unwrap().is_empty());
}

#[rstest]
#[case(
    "max_new_tokens: 6",
    "max_new_tokens: 6, stop_token_ids: [0, 6]",
    "sampling.stop_token_ids"
)]
#[case(
    "threads: 1",
    "threads: 1\nevaluation: {sampler: {stop_token_ids: [99]}}",
    "evaluation.sampler.stop_token_ids"
)]
fn a_stop_token_that_the_model_lacks_is_an_error(
    #[case] from: &str,
    #[case] to: &str,
    #[case] key: &str,
) {
    let folder = folder(&without(CONFIG, "evaluation").replace(from, to));
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        for words in [key, "must be below 6, the number of tokens of the model"] {
            assert!(said(&output).contains(words), "{}", said(&output));
        }
    }
}

/// Ctrl-Z and `fg`: the answer is there when the program continues, and its time is over.
#[cfg(target_os = "linux")]
#[test]
fn time_in_which_the_program_is_stopped_does_not_count_for_rewards() {
    // The first request stops the program, and the answer comes later than its time.
    let script = "
import os, signal, sys, time
stops = True
for line in sys.stdin:
    if stops:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(5)
    print(1, flush=True)
    if stops:
        os.kill(os.getppid(), signal.SIGCONT)
        stops = False
";
    let folder = with_program(script);
    let config = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
    let config = without(&config, "evaluation")
        .replace("time_limit_seconds: 600", "time_limit_seconds: 3")
        .replace(
            "reward.py]",
            "reward.py], start_limit_seconds: 0, workers: 1",
        )
        .replace("max_steps: 12", "max_steps: 1");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    assert_eq!(metrics[0]["reward_mean"], 1., "{}", metrics[0]);
    assert!(!said(&output).contains("time"), "{}", said(&output));
}
