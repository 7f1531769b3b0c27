//! Programs as reward functions, well behaved and not.

use std::fs;
use std::time::{Duration, Instant};

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_grpo_train::rewards::{ProgramConfig, ProgramReward};
use candle_grpo_train::{FinishReason, Interrupted, Progress, RewardFunction, Sample};
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
            messages: &[],
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
fn a_program_keeps_running_between_batches() {
    let reward = program(
        r#"n=0; while read -r line; do echo "{\"id\": $n, \"score\": $n}"; n=$((n+1)); done"#,
        20.,
        0,
    );
    assert_eq!(score(&reward, &["a", "b"]).unwrap(), [0., 1.]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [2.]);
    assert_eq!(score(&reward, &[]).unwrap(), [] as [f32; 0]);
}

/// Its input ends with the batch, so that its output shows that nothing follows the scores.
#[test]
fn a_program_without_ids_is_started_for_each_batch() {
    let reward = program(
        r#"n=0; while read -r line; do n=$((n+1)); echo "{\"score\": $n}"; done"#,
        20.,
        0,
    );
    assert_eq!(score(&reward, &["a", "b"]).unwrap(), [1., 2.]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [1.]);
    assert_eq!(score(&reward, &[]).unwrap(), [] as [f32; 0]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [1.]);
}

/// Two scores are there early: that of no request, and the first. The last one is slow.
#[test]
fn an_additional_line_is_an_error_before_a_slow_last_score() {
    for delay in ["0.1", "1"] {
        let reward = program(
            &format!(
                "read -r line; echo 7; echo 1; read -r line; sleep {delay}; echo 2; cat > /dev/null"
            ),
            20.,
            0,
        );
        let error = error(&reward, &["a", "b"]);
        assert!(
            error.contains("wrote \"2\" after the last score"),
            "{error}"
        );
    }
}

#[test]
fn a_program_without_ids_must_end_with_its_input() {
    let reward = program("read -r line; echo 1; sleep 600", 0.5, 1);
    let error = error(&reward, &["a"]);
    assert!(
        error.contains("must end with its input, or echo the \"id\""),
        "{error}"
    );
    assert!(!error.contains("tried"), "{error}");
}

#[test]
fn a_request_has_everything_about_a_completion() {
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
        json!({"id": 0, "prompt": "ask", "completion": "two\nlines", "finish_reason": "length", "completion_tokens": 2, "columns": {"answer": 3}})
    );
}

#[test]
fn an_error_shows_the_status_and_the_end_of_stderr() {
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
fn a_program_that_ends_is_started_again_for_the_whole_batch() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark");
    let script = format!(
        "if [ ! -e {0} ]; then touch {0}; read -r line; echo 9; exit 1; fi; while read -r line; do echo 1; done",
        mark.display()
    );
    // The score of the first run does not count.
    assert_eq!(
        score(&program(&script, 20., 1), &["a", "b"]).unwrap(),
        [1., 1.]
    );
}

#[test]
fn a_program_that_takes_too_long_is_killed_with_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!("sleep 600 & echo $! > {}; wait", pid.display());
    let reward = program(&script, 0.5, 0);
    let began = Instant::now();
    let error = error(&reward, &["a"]);
    assert!(
        error.contains("0 of 1 scores after 0.5 seconds, the limit; it must answer each line"),
        "{error}"
    );
    assert!(began.elapsed() < Duration::from_secs(60));
    let pid: u32 = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    assert!(ends(pid), "the process {pid} that it started still runs");
}

#[test]
fn a_program_that_reads_all_its_input_first_is_told_to_answer_each_line() {
    let reward = program("cat > /dev/null; echo 1; echo 1", 0.5, 0);
    let error = error(&reward, &["a", "b"]);
    for words in [
        "0 of 2 scores after 0.5 seconds, the limit",
        "it must answer each line when it comes, not at the end of its input",
        "and flush every line",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn a_program_that_answers_one_line_and_ends_is_told_to_go_on() {
    let error = error(&program("read -r line; echo 1", 20., 0), &["a", "b"]);
    assert!(
        error.contains("ended after 1 of 2 scores; it must answer every line until its input ends"),
        "{error}"
    );
}

/// Returns true if the process ends within a few seconds, reaped by its parent or not.
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
fn full_pipes_do_not_block() {
    // More than a pipe holds goes in before anything comes out, and more than a pipe holds comes
    // out of stderr.
    let script = r#"head -n 300 > /dev/null; yes complaint | head -c 300000 >&2; for i in $(seq 300); do echo 2; done; cat > /dev/null"#;
    let reward = program(script, 60., 0);
    let long = "x".repeat(2000);
    assert_eq!(
        score(&reward, &vec![long.as_str(); 300]).unwrap(),
        [2.; 300]
    );
}

#[test]
fn a_program_that_does_not_read_exceeds_the_time() {
    let reward = program("sleep 600", 0.5, 0);
    let long = "x".repeat(10_000);
    let error = error(&reward, &vec![long.as_str(); 100]);
    assert!(error.contains("the limit"), "{error}");
}

/// Echoes the id, and gives the number of characters of the completion.
const ECHO: &str = r#"
import json, sys
for line in sys.stdin:
    sample = json.loads(line)
    print(json.dumps({"id": sample["id"], "score": len(sample["completion"])}), flush=True)
"#;

fn python(script: &str) -> ProgramReward {
    ProgramReward::new(ProgramConfig {
        command: ["python3", "-c", script].map(str::to_owned).to_vec(),
        folder: None,
        time_limit_seconds: 60.,
        restarts: 1,
    })
    .unwrap()
}

#[test]
fn answers_with_ids_may_come_in_any_order() {
    let reward = python(
        r#"
import json, sys
waiting = []
for line in sys.stdin:
    sample = json.loads(line)
    waiting.append({"id": sample["id"], "score": len(sample["completion"])})
    if len(waiting) == 3:
        for answer in reversed(waiting):
            print(json.dumps(answer), flush=True)
        waiting = []
"#,
    );
    assert_eq!(score(&reward, &["a", "bb", "ccc"]).unwrap(), [1., 2., 3.]);
    assert_eq!(score(&reward, &["ccc", "", "a"]).unwrap(), [3., 0., 1.]);
    reward.finish().unwrap();
}

#[test]
fn a_wrong_id_is_an_error() {
    for (change, words) in [
        (
            "sample['id'] + 100",
            "must have the id of one of the requests, 0 to 1",
        ),
        ("0", "answers a request twice"),
        ("'0'", "must be the number of the request"),
    ] {
        let script = ECHO.replace("sample[\"id\"]", change);
        let error = error(&python(&script), &["a", "b"]);
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn ids_in_some_answers_only_are_an_error() {
    let reward = program(
        r#"read -r line; echo '{"id": 0, "score": 1}'; read -r line; echo 1; cat > /dev/null"#,
        20.,
        0,
    );
    let error = error(&reward, &["a", "b"]);
    assert!(
        error.contains("give one to all answers or to none"),
        "{error}"
    );
}

/// The batch has no scores, whenever the line comes.
#[test]
fn an_additional_line_is_an_error_of_its_batch() {
    let delays = ["0", "0.005", "0.05", "0.3"];
    let scripts = [
        // Before the first request.
        "echo 7; sleep DELAY; while read -r line; do echo 1; done",
        "sleep DELAY; echo 7; while read -r line; do echo 1; done",
        // After the first answer, together with it or later.
        "read -r line; echo 1; sleep DELAY; echo 7; while read -r line; do echo 1; done",
        "read -r line; echo 1; (sleep DELAY; echo 7) & while read -r line; do echo 1; done; wait",
        // After the last answer, and after the end of the input.
        "while read -r line; do echo 1; done; sleep DELAY; echo 7",
    ];
    for script in scripts {
        for delay in delays {
            let reward = program(&script.replace("DELAY", delay), 20., 1);
            let error = error(&reward, &["a", "b"]);
            assert!(
                error.contains("wrote \"7\"") || error.contains("wrote \"1\""),
                "{error}"
            );
        }
    }
}

#[test]
fn two_lines_for_each_request_are_an_error_at_the_first_batch() {
    let reward = program("while read -r line; do echo 1; echo 7; done", 20., 1);
    let error = error(&reward, &["a", "b"]);
    assert!(error.contains("after the last score of a batch"), "{error}");
    // It is no use to start it again.
    assert!(!error.contains("tried"), "{error}");
}

#[test]
fn an_additional_line_among_answers_with_ids_is_an_error_at_once() {
    let script = ECHO.replace("    print(", "    print(0.5, flush=True)\n    print(");
    let error = error(&python(&script), &["a", "bb"]);
    assert!(
        error.contains("give one to all answers or to none"),
        "{error}"
    );
}

#[test]
fn a_correct_program_finishes_without_an_error() {
    for reward in [
        python(ECHO),
        program("while read -r line; do echo 1; done", 20., 0),
    ] {
        score(&reward, &["a", "b"]).unwrap();
        reward.finish().unwrap();
        // It may go on after that.
        score(&reward, &["a"]).unwrap();
    }
}

#[test]
fn output_that_is_no_line_is_an_error() {
    for (script, words) in [
        ("read -r line; printf 1", "ended within the line \"1\""),
        (r"printf '\377\n'; cat > /dev/null", "not UTF-8"),
        (
            "yes | tr -d '\\n' | head -c 3000000; cat > /dev/null",
            "a line of more than 1 MiB",
        ),
    ] {
        let error = error(&program(script, 20., 0), &["a"]);
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

/// Asks to stop once it is set.
#[derive(Default)]
struct Stop(AtomicBool);

impl Progress for Stop {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_stop_request_waits_for_a_hanging_program_only_for_a_grace_period() {
    let mut reward = program("sleep 600", 600., 0);
    let stop = Arc::new(Stop::default());
    reward.set_progress(stop.clone());
    let begun = Instant::now();
    let scored = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            stop.0.store(true, Ordering::SeqCst);
        });
        score(&reward, &["a"])
    });
    let error = scored.unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn scores_that_come_within_the_grace_period_count() {
    let mut reward = program("sleep 1; while read -r line; do echo 1; done", 600., 0);
    let stop = Arc::new(Stop::default());
    stop.0.store(true, Ordering::SeqCst);
    reward.set_progress(stop);
    assert_eq!(score(&reward, &["a"]).unwrap(), [1.]);
}

/// This test program starts itself, as a process that has a reward program and is killed.
#[test]
fn a_program_and_its_children_end_with_a_process_that_is_killed() {
    const CHILD: &str = "CANDLE_GRPO_TEST_PIDS";
    if let Some(folder) = std::env::var_os(CHILD) {
        let script = format!(
            "sleep 600 & echo $! > {0}/child; echo $$ > {0}/program; exec sleep 600",
            folder.to_string_lossy()
        );
        let _reward = program(&script, 600., 0);
        std::thread::sleep(Duration::from_secs(600));
    }
    let folder = tempfile::tempdir().unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "program_reward::a_program_and_its_children_end_with_a_process_that_is_killed",
        ])
        .env(CHILD, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = |name: &str| -> u32 {
        let begun = Instant::now();
        loop {
            let text = fs::read_to_string(folder.path().join(name)).unwrap_or_default();
            if let Some(pid) = text.strip_suffix('\n') {
                return pid.parse().unwrap();
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no {name}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let pids = [pid("child"), pid("program")];
    process.kill().unwrap();
    process.wait().unwrap();
    for pid in pids {
        assert!(ends(pid), "the process {pid} still runs");
    }
}

#[test]
fn a_missing_program_is_an_error_before_the_first_batch() {
    let reward = ProgramReward::new(ProgramConfig {
        command: vec!["/no/such/program".to_owned()],
        folder: None,
        time_limit_seconds: 1.,
        restarts: 0,
    });
    let error = format!("{:#}", reward.err().unwrap());
    assert!(error.contains("starting \"/no/such/program\""), "{error}");
}
