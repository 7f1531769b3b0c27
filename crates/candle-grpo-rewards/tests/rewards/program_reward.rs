//! Programs as reward functions, well behaved and not.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use candle_grpo_rewards::{FinishReason, Interrupted, Progress, RewardFunction, Sample};
use candle_grpo_rewards::{OnFailure, ProgramConfig, ProgramReward, Score, ScoreFailure};
use candle_grpo_test_support::{Lines, WATCHDOG, named_pipe};
use rstest::rstest;
use serde_json::{Value, json};

/// A limit in seconds that no program reaches. A test in which one does lasts longer than
/// [`WATCHDOG`].
const NEVER: f64 = 600.;

/// Returns a named pipe in its own directory. A script that has opened it shows that it runs.
fn witness() -> (tempfile::TempDir, PathBuf, Lines) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("witness");
    let lines = Lines::of_named_pipe(&path);
    (folder, path, lines)
}

fn config(command: &[&str], time_limit_seconds: f64) -> ProgramConfig {
    let config = json!({
        "command": command,
        "time_limit_seconds": time_limit_seconds,
        "start_limit_seconds": 0,
        "max_failures": 3,
    });
    serde_json::from_value(config).unwrap()
}

fn program(script: &str, time_limit_seconds: f64) -> ProgramReward {
    ProgramReward::new(config(&["sh", "-c", script], time_limit_seconds)).unwrap()
}

fn score(reward: &ProgramReward, completions: &[&str]) -> anyhow::Result<Vec<Score>> {
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
            group: 0,
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
        NEVER,
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
        NEVER,
    );
    assert_eq!(score(&reward, &["a", "b"]).unwrap(), [1., 2.]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [1.]);
    assert_eq!(score(&reward, &[]).unwrap(), [] as [f32; 0]);
    assert_eq!(score(&reward, &["c"]).unwrap(), [1.]);
}

/// Two scores are early: the first, and one that no request asked for. The last one is slow.
#[test]
fn an_additional_line_is_an_error_before_a_slow_last_score() {
    let script = "read -r line; echo 7; echo 1; read -r line; sleep 0.1; echo 2; cat > /dev/null";
    let error = error(&program(script, NEVER), &["a", "b"]);
    assert!(
        error.contains("wrote \"2\" after the last answer"),
        "{error}"
    );
}

#[test]
fn a_program_without_ids_must_end_with_its_input() {
    let mut config = config(&["sh", "-c", "read -r line; echo 1; sleep 600"], 0.2);
    config.start_limit_seconds = NEVER;
    let error = error(&ProgramReward::new(config).unwrap(), &["a"]);
    assert!(
        error.contains("must end with its input, or echo the \"id\""),
        "{error}"
    );
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
        NEVER,
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
    let reward = program("echo no such module >&2; exit 3", NEVER);
    let error = error(&reward, &["a"]);
    for words in [
        "failed with every completion so far",
        "ended after 0 of 1 answers",
        "exit status: 3",
        "no such module",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn scores_without_ids_do_not_count_if_the_program_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark");
    let script = format!(
        "if [ ! -e {0} ]; then touch {0}; read -r line; echo 9; exit 1; fi; while read -r line; do echo 1; done",
        mark.display()
    );
    // The score of the first run does not count.
    assert_eq!(
        score(&program(&script, NEVER), &["a", "b"]).unwrap(),
        [1., 1.]
    );
}

#[test]
fn a_program_that_takes_too_long_is_killed_with_its_children() {
    let (_folder, path, lines) = witness();
    let script = format!("exec 3> {}; sleep 600 & wait", path.display());
    let reward = program(&script, 0.5);
    let error = error(&reward, &["a"]);
    assert!(
        error.contains(
            "0 of 1 answers, and no other within 0.5 seconds, the limit; it must answer each line"
        ),
        "{error}"
    );
    // The program and its child have closed it.
    lines.wait_for_end();
}

#[test]
fn a_program_that_reads_all_its_input_first_is_told_to_answer_each_line() {
    let reward = program("cat > /dev/null; echo 1; echo 1", 0.5);
    let error = error(&reward, &["a", "b"]);
    for words in [
        "0 of 1 answers, and no other within 0.5 seconds, the limit",
        "it must answer each line when it comes, not at the end of its input",
        "and flush every line",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn a_program_that_ends_before_its_first_answer_has_two_attempts() {
    let reward = program("read -r line; exit 3", NEVER);
    let error = error(&reward, &["a", "b", "c"]);
    assert!(
        error.contains("no answer at all in 2 attempts, the last: "),
        "{error}"
    );
}

#[test]
fn a_program_that_ends_after_each_answer_is_started_for_each_completion() {
    let reward = program("read -r line; echo 1", NEVER);
    assert_eq!(score(&reward, &["a", "b"]).unwrap(), [1., 1.]);
}

#[test]
fn full_pipes_do_not_block() {
    // More than a pipe holds goes in before anything comes out, and more than a pipe holds comes
    // out of stderr.
    let script = r#"head -n 300 > /dev/null; yes complaint | head -c 300000 >&2; for i in $(seq 300); do echo 2; done; cat > /dev/null"#;
    let reward = program(script, NEVER);
    let long = "x".repeat(2000);
    assert_eq!(
        score(&reward, &vec![long.as_str(); 300]).unwrap(),
        [2.; 300]
    );
}

#[test]
fn a_program_that_does_not_read_exceeds_the_time() {
    let reward = program("sleep 600", 0.5);
    let long = "x".repeat(10_000);
    let error = error(&reward, &vec![long.as_str(); 100]);
    assert!(error.contains("the limit"), "{error}");
}

/// Echoes the id, and returns the number of characters in the completion.
const ECHO: &str = r#"
import json, sys
for line in sys.stdin:
    sample = json.loads(line)
    print(json.dumps({"id": sample["id"], "score": len(sample["completion"])}), flush=True)
"#;

fn python(script: &str) -> ProgramReward {
    ProgramReward::new(config(&["python3", "-c", script], NEVER)).unwrap()
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
        NEVER,
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
    let delays = ["0", "0.005", "0.05"];
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
            let reward = program(&script.replace("DELAY", delay), NEVER);
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
    let reward = program("while read -r line; do echo 1; echo 7; done", NEVER);
    let error = error(&reward, &["a", "b"]);
    assert!(
        error.contains("after the last answer of a batch"),
        "{error}"
    );
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
        program("while read -r line; do echo 1; done", NEVER),
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
        let error = error(&program(script, NEVER), &["a"]);
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

/// Requests a stop once it is set.
#[derive(Default)]
struct Stop(AtomicBool);

impl Progress for Stop {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_stop_request_waits_for_a_hanging_program_only_for_a_grace_period() {
    let (_folder, path, lines) = witness();
    let script = format!("exec 3> {}; echo runs >&3; sleep 600", path.display());
    let mut reward = program(&script, NEVER);
    let stop = Arc::new(Stop::default());
    reward.set_progress(stop.clone());
    let begun = Instant::now();
    let scored = std::thread::scope(|scope| {
        scope.spawn(|| {
            lines.line();
            stop.0.store(true, Ordering::SeqCst);
        });
        score(&reward, &["a"])
    });
    let error = scored.unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
    assert!(begun.elapsed() < WATCHDOG);
}

#[test]
fn scores_that_come_within_the_grace_period_count() {
    let mut reward = program("while read -r line; do echo 1; done", NEVER);
    let stop = Arc::new(Stop::default());
    stop.0.store(true, Ordering::SeqCst);
    reward.set_progress(stop);
    assert_eq!(score(&reward, &["a"]).unwrap(), [1.]);
}

/// This test program starts itself, as a process that has a reward program and is killed.
#[test]
fn a_program_and_its_children_end_with_a_process_that_is_killed() {
    const CHILD: &str = "CANDLE_GRPO_TEST_WITNESS";
    if let Some(path) = std::env::var_os(CHILD) {
        let script = format!(
            "exec 3> {}; sleep 600 & echo both run >&3; exec sleep 600",
            path.to_string_lossy()
        );
        // It is killed before there is a score.
        score(&program(&script, NEVER), &["a"]).unwrap_err();
    }
    let (_folder, path, lines) = witness();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "program_reward::a_program_and_its_children_end_with_a_process_that_is_killed",
        ])
        .env(CHILD, path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    lines.line();
    process.kill().unwrap();
    process.wait().unwrap();
    lines.wait_for_end();
}

#[test]
fn a_missing_program_is_an_error_before_the_first_batch() {
    let reward = ProgramReward::new(config(&["/no/such/program"], 1.));
    let error = format!("{:#}", reward.err().unwrap());
    assert!(error.contains("starting \"/no/such/program\""), "{error}");
}

/// Echoes the id. The completion decides: it hangs, crashes, has no score, or scores its length. A
/// shell starts at once, so short limits only affect completions that hang.
const HOSTILE: &str = r#"
while read -r line; do
  id=${line##*'"id":'} id=${id%%[,\}]*}
  text=${line#*'"completion":"'} text=${text%%'"'*}
  score=${#text}
  case $text in
    hang) sleep 600;;
    crash) exit 3;;
    null) score=null;;
  esac
  echo "{\"id\": $id, \"score\": $score}"
done
"#;

fn hostile(change: impl FnOnce(&mut ProgramConfig)) -> ProgramReward {
    let mut config = config(&["sh", "-c", HOSTILE], 1.);
    config.start_limit_seconds = 1.;
    change(&mut config);
    ProgramReward::new(config).unwrap()
}

const COMPLETIONS: [&str; 9] = [
    "a", "hang", "bb", "null", "ccc", "crash", "hang", "", "dddd",
];

fn expected(instead: Score) -> [Score; 9] {
    let late = instead.after(ScoreFailure::Timeout);
    let ended = instead.after(ScoreFailure::Crash);
    [
        1f32.into(),
        late,
        2f32.into(),
        Score::NONE,
        3f32.into(),
        ended,
        late,
        0f32.into(),
        4f32.into(),
    ]
}

#[rstest]
#[case(1, OnFailure::Score)]
#[case(1, OnFailure::Exclude)]
#[case(2, OnFailure::Score)]
#[case(4, OnFailure::Exclude)]
#[case(12, OnFailure::Score)]
fn completions_that_hang_or_crash_do_not_touch_the_others(
    #[case] workers: usize,
    #[case] on_timeout: OnFailure,
) {
    let reward = hostile(|config| {
        config.workers = workers;
        // A worker may get only completions that fail.
        config.max_failures = 8;
        config.on_timeout = on_timeout;
        config.timeout_score = -0.5;
    });
    let expected = expected(match on_timeout {
        OnFailure::Score => Score::from(-0.5),
        OnFailure::Exclude => Score::NONE,
    });
    assert_eq!(score(&reward, &COMPLETIONS).unwrap(), expected);
    assert_eq!(score(&reward, &["a", "bb"]).unwrap(), [1., 2.]);
    reward.finish().unwrap();
}

/// Its scores count only if its output has ended with them.
#[test]
fn a_program_without_ids_survives_completions_that_hang_or_crash() {
    let script = HOSTILE.replace(r#""{\"id\": $id, \"score\": $score}""#, "$score");
    assert_ne!(script, HOSTILE);
    let reward = hostile(|config| config.command[2] = script);
    let expected = expected(Score::from(0.));
    assert_eq!(score(&reward, &COMPLETIONS).unwrap(), expected);
}

#[test]
fn a_program_that_fails_with_too_many_completions_in_a_row_is_an_error() {
    let reward = hostile(|config| config.max_failures = 3);
    let three = ["crash", "crash", "crash", "a"];
    score(&reward, &three).unwrap();
    // The last completion is sent first after a failure, and three others fail since then.
    let error = error(&reward, &["crash"]);
    for words in ["4 completions in a row failed", "exit status: 3"] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn the_limit_is_that_of_each_completion_and_not_of_the_start() {
    let slow = r#"sleep 1.6; while read -r line; do sleep 0.2; echo 1; done"#;
    let mut config = config(&["sh", "-c", slow], 1.5);
    config.start_limit_seconds = NEVER;
    let reward = ProgramReward::new(config).unwrap();
    assert_eq!(score(&reward, &["a"; 8]).unwrap(), [1.; 8]);
}

#[test]
fn workers_score_at_the_same_time() {
    // Each end of a named pipe waits for the other.
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    named_pipe(&pipe);
    let script = format!(
        r#"read -r line; case "$line" in *first*) echo > {0};; *) read -r end < {0};; esac
        echo 1; cat > /dev/null"#,
        pipe.display()
    );
    let mut config = config(&["sh", "-c", &script], NEVER);
    config.workers = 2;
    let reward = ProgramReward::new(config).unwrap();
    assert_eq!(score(&reward, &["first", "second"]).unwrap(), [1.; 2]);
}

#[rstest]
#[case(json!({"workers": 0}), "workers: 0")]
#[case(json!({"time_limit_seconds": 0}), "time_limit_seconds: 0")]
#[case(json!({"start_limit_seconds": -1}), "start_limit_seconds: -1")]
#[case(json!({"timeout_score": 1e300}), "timeout_score")]
fn an_option_that_is_not_valid_is_named(#[case] change: Value, #[case] expected: &str) {
    let mut options = json!({"command": ["true"]});
    let change = change.as_object().unwrap().clone();
    options.as_object_mut().unwrap().extend(change);
    let config = serde_json::from_value::<ProgramConfig>(options).unwrap();
    let error = format!("{:#}", config.validate().unwrap_err());
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_program_that_never_answers_is_an_error_after_two_attempts() {
    let folder = tempfile::tempdir().unwrap();
    let starts = folder.path().join("starts");
    // As one that does not flush: its answer comes at the end of its input.
    let script = format!(
        "echo x >> {}; n=0; while read -r line; do n=$((n+1)); done; echo $n",
        starts.display()
    );
    let mut config = config(&["sh", "-c", &script], 0.3);
    config.max_failures = 1000;
    let reward = ProgramReward::new(config).unwrap();
    let error = error(&reward, &["a"; 40]);
    for words in [
        "no answer at all in 2 attempts",
        "flush",
        "within 0.3 seconds",
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
    // A start may be over before it has written.
    let starts = fs::read_to_string(starts).unwrap_or_default();
    assert!(starts.lines().count() <= 2, "{starts:?}");
}
