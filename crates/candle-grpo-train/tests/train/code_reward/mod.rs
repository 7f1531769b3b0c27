//! Programs of completions: right, wrong and hostile ones.

mod hostile;
mod languages;
mod problems;
mod table;
mod weak;

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use candle_grpo_train::rewards::{CodeReward, Score};
use candle_grpo_train::{FinishReason, RewardFunction, Sample};
use serde_json::{Value, json};

/// The interpreter: that of the system, if there is one, since its files are readable for all.
fn python() -> Value {
    match fs::exists("/usr/bin/python3") {
        Ok(true) => json!(["/usr/bin/python3", "-s", "-S"]),
        _ => json!(["python3", "-s", "-S"]),
    }
}

fn with_options(options: Value) -> anyhow::Result<CodeReward> {
    let mut all = json!({"python": python()});
    let fields = options.as_object().unwrap().clone();
    all.as_object_mut().unwrap().extend(fields);
    CodeReward::new(serde_json::from_value(all).unwrap())
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

/// A reward with these options, where programs are isolated.
fn isolated(options: Value) -> Option<CodeReward> {
    is_isolated().then(|| with_options(options).unwrap())
}

fn fenced(program: &str) -> String {
    format!("A program:\n~~~~python\n{program}\n~~~~\n")
}

/// The scores of completions, each with its row.
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

/// The score of a program with these tests.
fn score(reward: &CodeReward, program: &str, tests: Value) -> f32 {
    let completion = (fenced(program), json!({"tests": tests}));
    scores(reward, &[completion]).unwrap()[0].value().unwrap()
}

/// The processes that have `word` among their arguments.
fn processes_with(word: &str) -> Vec<String> {
    let folders = fs::read_dir("/proc").unwrap();
    let lines = folders.filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(word)).collect()
}

/// Fails if such a process is still there after a minute. The system ends a killed process later
/// than the call that kills it.
fn assert_ended(word: &str) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if processes_with(word).is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(processes_with(word), [""; 0]);
}

/// A name that no other test has.
fn unique(name: &str) -> String {
    format!("{name}_{}.py", std::process::id())
}
