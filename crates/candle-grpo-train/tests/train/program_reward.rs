//! Programs of the user's as reward functions.

use std::fs;
use std::time::{Duration, Instant};

use candle_grpo_train::{FinishReason, ProgramConfig, ProgramReward, RewardFunction, Sample};
use serde_json::{Value, json};

fn program(script: &str, time_limit_seconds: f64, restarts: usize) -> ProgramReward {
    ProgramReward::new(ProgramConfig {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        folder: None,
        time_limit_seconds,
        restarts,
    })
    .unwrap()
}

fn score(reward: &ProgramReward, completions: &[&str]) -> anyhow::Result<Vec<f32>> {
    let columns = json!({"answer": 3});
    let samples: Vec<Sample> = completions
        .iter()
        .map(|completion| Sample {
            prompt: "ask",
            completion,
            prompt_tokens: &[1],
            completion_tokens: &[2, 3],
            finish_reason: FinishReason::Length,
            columns: &columns,
        })
        .collect();
    reward.score(&samples)
}

fn error(reward: &ProgramReward, completions: &[&str]) -> String {
    format!("{:#}", score(reward, completions).unwrap_err())
}

#[test]
fn it_keeps_running_between_batches() {
    let reward = program(
        r#"n=0; while read -r line; do n=$((n+1)); echo "{\"score\": $n}"; done"#,
        20.,
        0,
    );
    assert_eq!(score(&reward, &["a", "b"]).unwrap(), [1., 2.]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [3.]);
    assert_eq!(score(&reward, &[]).unwrap(), [] as [f32; 0]);
}

#[test]
fn it_is_told_everything_about_a_completion() {
    let folder = tempfile::tempdir().unwrap();
    let seen = folder.path().join("seen");
    let reward = program(
        &format!(
            "while read -r line; do printf '%s\\n' \"$line\" >> {}; echo 0.5; done",
            seen.display()
        ),
        20.,
        0,
    );
    assert_eq!(score(&reward, &["two\nlines"]).unwrap(), [0.5]);
    let line: Value = serde_json::from_str(&fs::read_to_string(seen).unwrap()).unwrap();
    assert_eq!(
        line,
        json!({"prompt": "ask", "completion": "two\nlines", "finish_reason": "length", "completion_tokens": 2, "columns": {"answer": 3}})
    );
}

#[test]
fn an_error_shows_what_it_said_last() {
    let reward = program("echo no such module >&2; exit 3", 20., 1);
    let error = error(&reward, &["a"]);
    for words in [
        "tried 2 times",
        "ended after 0 of 1 scores",
        "exit status: 3",
        "no such module",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn it_is_started_again_once() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark");
    let script = format!(
        "if [ ! -e {0} ]; then touch {0}; read -r line; echo 9; exit 1; fi; while read -r line; do echo 1; done",
        mark.display()
    );
    // What the first run had scored does not count.
    assert_eq!(
        score(&program(&script, 20., 1), &["a", "b"]).unwrap(),
        [1., 1.]
    );
}

#[test]
fn what_takes_too_long_is_ended_with_all_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!("sleep 600 & echo $! > {}; wait", pid.display());
    let reward = program(&script, 0.5, 0);
    let began = Instant::now();
    let error = error(&reward, &["a"]);
    assert!(
        error.contains("0 of 1 scores after 0.5 seconds, the limit"),
        "{error}"
    );
    assert!(began.elapsed() < Duration::from_secs(60));
    let pid: u32 = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    assert!(ends(pid), "the process {pid} that it started still runs");
}

/// Whether the process is gone, or dead and waits for its parent, within a few seconds.
fn ends(pid: u32) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) if !stat.contains(") Z ") => std::thread::sleep(Duration::from_millis(20)),
            _ => return true,
        }
    }
    false
}

#[test]
fn full_pipes_stop_nothing() {
    // More than a pipe holds goes in before anything comes out, and more than a pipe holds comes out of stderr.
    let script = r#"head -n 300 > /dev/null; yes complaint | head -c 300000 >&2; for i in $(seq 300); do echo 2; done; cat > /dev/null"#;
    let reward = program(script, 60., 0);
    let long = "x".repeat(2000);
    assert_eq!(
        score(&reward, &vec![long.as_str(); 300]).unwrap(),
        [2.; 300]
    );
}

#[test]
fn a_program_that_does_not_read_ends_with_the_time() {
    let reward = program("sleep 600", 0.5, 0);
    let long = "x".repeat(10_000);
    let error = error(&reward, &vec![long.as_str(); 100]);
    assert!(error.contains("the limit"), "{error}");
}

#[test]
fn nonsense_is_an_error_that_shows_it() {
    for (line, words) in [
        ("good", "\\\"good\\\", must be JSON"),
        ("null", "\\\"null\\\", must be a number"),
        ("1e999", "must be"),
        ("{}", "the number \"score\""),
    ] {
        let error = error(
            &program(&format!("echo '{line}'; cat > /dev/null"), 20., 0),
            &["a"],
        );
        let words = words.replace("\\\"", "\"");
        assert!(error.contains(&words), "{words:?} in {error}");
    }
    let twice = program("while read -r line; do echo 1; echo 1; done", 20., 0);
    let first = score(&twice, &["a"]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(first.is_err() || score(&twice, &["a"]).is_err());
}

#[test]
fn a_missing_program_is_named() {
    let reward = ProgramReward::new(ProgramConfig {
        command: vec!["/no/such/program".to_owned()],
        folder: None,
        time_limit_seconds: 1.,
        restarts: 0,
    })
    .unwrap();
    assert!(error(&reward, &["a"]).contains("starting \"/no/such/program\""));
}
