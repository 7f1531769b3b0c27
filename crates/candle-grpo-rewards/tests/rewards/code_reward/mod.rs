//! Programs in completions: right, wrong and hostile ones.

mod forms;
mod hostile;
mod isolated_programs;
mod languages;
mod problems;
mod table;
mod weak;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::OnceLock;

use candle_grpo_rewards::{CodeConfig, CodeReward, Score};
use candle_grpo_rewards::{FinishReason, RewardFunction, Sample};
use candle_grpo_test_support::Lines;
use serde_json::{Value, json};

/// Returns the interpreter: the system's, if there is one, because everyone can read its files.
fn python() -> Value {
    match fs::exists("/usr/bin/python3") {
        Ok(true) => json!(["/usr/bin/python3", "-s", "-S"]),
        _ => json!(["python3", "-s", "-S"]),
    }
}

/// Creates a reward with these options. The time is [`NEVER`] unless they have limits.
fn with_options(options: Value) -> anyhow::Result<CodeReward> {
    let mut all = json!({"python": python(), "limits": {"time_seconds": NEVER}});
    let fields = options.as_object().unwrap().clone();
    all.as_object_mut().unwrap().extend(fields);
    let config: CodeConfig = serde_json::from_value(all).unwrap();
    // On a busy machine the interpreter may take longer than a short limit to start.
    let is_late = |reward: &anyhow::Result<CodeReward>| {
        let error = reward.as_ref().err().map(ToString::to_string);
        config.limits.time_seconds < NEVER
            && error.is_some_and(|error| error.contains("does not start in the sandbox"))
    };
    for _ in 0..50 {
        let reward = CodeReward::new(config.clone());
        if !is_late(&reward) {
            return reward;
        }
    }
    CodeReward::new(config)
}

/// Returns true if this machine isolates programs. Otherwise it prints the reason, once.
fn is_isolated() -> bool {
    static ISOLATED: OnceLock<bool> = OnceLock::new();
    *ISOLATED.get_or_init(|| {
        let reward = with_options(json!({"require_isolation": true}));
        let reason = reward.err().map(|error| format!("{error:#}"));
        if let Some(reason) = &reason {
            eprintln!("tests of code rewards are skipped: {reason}");
        }
        reason.is_none()
    })
}

/// Creates a reward with these options, if programs are isolated.
fn isolated(options: Value) -> Option<CodeReward> {
    is_isolated().then(|| with_options(options).unwrap())
}

fn fenced(program: &str) -> String {
    format!("A program:\n~~~~python\n{program}\n~~~~\n")
}

/// Scores completions, each with its row.
fn scores(reward: &CodeReward, completions: &[(String, Value)]) -> anyhow::Result<Vec<Score>> {
    let samples: Vec<Sample> = completions
        .iter()
        .map(|(completion, columns)| Sample {
            prompt: "write f",
            messages: &[],
            completion,
            prompt_tokens: &[1],
            completion_tokens: &[2],
            finish_reason: FinishReason::StopToken,
            columns,
            group: 0,
        })
        .collect();
    reward.score(&samples)
}

/// Scores a program with these tests.
fn score(reward: &CodeReward, program: &str, tests: Value) -> f32 {
    let completion = (fenced(program), json!({"tests": tests}));
    scores(reward, &[completion]).unwrap()[0].value().unwrap()
}

/// A limit in seconds that no program reaches, also on a busy machine.
const NEVER: f64 = 3000.;

/// A named pipe that isolated programs can open. It ends with the last process that holds it open.
struct Witness {
    folder: tempfile::TempDir,
    lines: Lines,
}

impl Witness {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let others_enter = fs::Permissions::from_mode(0o755);
        fs::set_permissions(folder.path(), others_enter).unwrap();
        let lines = Lines::of_named_pipe(&folder.path().join("pipe"));
        Self { folder, lines }
    }

    /// Returns a program that opens the pipe as `witness` and continues with `program`, whose
    /// processes also hold it open.
    fn seen_by(&self, program: &str) -> String {
        let path = self.folder.path().join("pipe");
        format!("import os\nwitness = os.open({path:?}, os.O_WRONLY)\n{program}")
    }
}
