//! Programs that follow a run's metrics.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use super::support::{CONFIG, folder, grpo, lines, said, succeeds};

fn with_tracker(script: &str, options: &str) -> TempDir {
    let tracker = format!("trackers: [{{command: [python3, tracker.py]{options}}}]\n");
    let folder = folder(&format!("{CONFIG}{tracker}"));
    fs::write(folder.path().join("tracker.py"), script).unwrap();
    folder
}

const COPY: &str = "
import sys
with open('events.jsonl', 'a') as file:
    for line in sys.stdin:
        file.write(line)
print('copied', flush=True)
";

#[test]
fn a_tracker_receives_the_metrics_of_each_step_and_evaluation() {
    let folder = with_tracker(COPY, "");
    let folder = folder.path();
    let output = grpo(folder, &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(
        said(&output).contains("tracker.py: copied"),
        "{}",
        said(&output)
    );
    let events = lines(&folder.join("events.jsonl"));
    let of = |event: &str| -> Vec<&Value> {
        events
            .iter()
            .filter(|line| line["event"] == event)
            .collect()
    };
    let begin = &events[0];
    assert_eq!(begin["event"], "begin");
    assert_eq!(begin["step"], 0);
    assert_eq!(begin["settings"]["max_steps"], 12);
    assert_eq!(begin["run_dir"], "run");
    let steps = of("step");
    let metrics = lines(&folder.join("run/metrics.jsonl"));
    assert_eq!(steps.len(), metrics.len());
    for (step, metrics) in steps.iter().zip(&metrics) {
        assert_eq!(step["step"], metrics["step"]);
        assert_eq!(step["metrics"]["reward_mean"], metrics["reward_mean"]);
        assert!(step["metrics"]["seconds/train"].is_number());
    }
    let evaluations = of("evaluation");
    let written = lines(&folder.join("run/evaluations.jsonl"));
    assert_eq!(evaluations.len(), written.len());
    let last = evaluations.last().unwrap();
    assert_eq!(last["step"], 12);
    assert_eq!(
        last["metrics"]["evaluation/reward_mean"],
        written.last().unwrap()["reward_mean"]
    );
    let end = events.last().unwrap();
    assert_eq!(end["event"], "end");
    assert_eq!(end["status"], "finished");

    // A run that resumes reports its step.
    let text = fs::read_to_string(folder.join("run.yaml")).unwrap();
    let longer = text.replace("max_steps: 12", "max_steps: 13");
    fs::write(folder.join("run.yaml"), longer).unwrap();
    succeeds(folder, &["train", "run.yaml", "--resume", "--quiet"]);
    let events = lines(&folder.join("events.jsonl"));
    let mut begins = events.iter().filter(|line| line["event"] == "begin");
    assert_eq!(begins.next_back().unwrap()["step"], 12);
}

#[test]
fn a_tracker_that_ends_or_hangs_does_not_end_the_run() {
    for (script, options, words) in [
        (
            "import sys; sys.exit(3)",
            "",
            "tracker.py: ended (exit status: 3)",
        ),
        (
            "import time; time.sleep(600)",
            ", end_limit_seconds: 0.2",
            "tracker.py: has not ended within 0.2 seconds after its input and is killed",
        ),
    ] {
        let folder = with_tracker(script, options);
        let output = grpo(folder.path(), &["train", "run.yaml", "--quiet"]);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
        assert_eq!(lines(&folder.path().join("run/metrics.jsonl")).len(), 12);
    }
}

#[test]
fn a_missing_tracker_is_an_error_with_its_key() {
    let folder = with_tracker("", "");
    fs::remove_file(folder.path().join("tracker.py")).unwrap();
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        let words = "trackers[0].command: tracker.py, must be a file that exists";
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    let folder = with_tracker("", ", end_limit_seconds: -1");
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains("trackers[0].end_limit_seconds: -1, must be from 0 to 3600"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_wait_for_a_tracker_at_the_end_of_the_run() {
    use std::process::{Command, Stdio};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::support::command;

    // It reports that its input has ended, and hangs.
    let script = "
import sys, time
for line in sys.stdin: pass
print('ended', file=open('ended', 'w'), flush=True)
time.sleep(600)
";
    let folder = with_tracker(script, ", end_limit_seconds: 600");
    let ended = folder.path().join("ended");
    let made = Command::new("mkfifo").arg(&ended).status().unwrap();
    assert!(made.success());
    let mut train = command(folder.path(), &["train", "run.yaml", "--quiet"]);
    let child = train.stderr(Stdio::piped()).spawn().unwrap();
    // A read of the pipe blocks until then.
    assert_eq!(fs::read_to_string(&ended).unwrap(), "ended\n");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let words = "tracker.py: had not ended after its input when the run was canceled";
    assert!(said(&output).contains(words), "{}", said(&output));
}
