//! The bridge to verifiers, with an imitation of the package.

use std::process::Command;

use candle_grpo_train::environment::{AgentConfig, EpisodeEnd, SessionScope};
use candle_grpo_train::rollout::{PromptRequest, Rollout};
use candle_grpo_train::{FinishReason, Prompt};
use rstest::rstest;
use serde_json::{Value, json};

use super::drawer::{agents, limits, play, prompt, sampling, spelled, tokenizer};

/// Directory with the imitation.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/agents/fake_verifiers");

pub(crate) const BRIDGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../examples/environments/bridge.py"
);

/// Plays two episodes at once, whose answers begin with `text`.
fn run(text: &str) -> anyhow::Result<Vec<Rollout>> {
    let command = [
        "python3",
        "-S",
        "-B",
        BRIDGE,
        "verifiers",
        "sums",
        "--concurrent",
        "2",
    ];
    let config = AgentConfig {
        command: command.map(str::to_owned).to_vec(),
        folder: Some(FOLDER.into()),
        session: SessionScope::Shared,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let question = prompt("What is 3 + 5?");
    let prompt = Prompt::new(3, &question.text, json!({"idx": 3}), &tokenizer()).unwrap();
    let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled(text), FinishReason::StopToken);
    let (rollouts, draws) = play(&agents, &prompt, 2, &sampling(), &policy);
    for draw in &draws {
        assert_eq!(draw.before, question.tokens);
    }
    rollouts
}

#[test]
fn rewards_are_means_over_the_traces_that_train() {
    let rollouts = run("so").unwrap();
    assert_eq!(rollouts.len(), 2);
    for rollout in rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, episode.excluded), (&EpisodeEnd::Done, false));
        assert_eq!(episode.reward(), 0.625);
        let metrics = ["reward/right", "reward/short", "metric/letters"];
        assert_eq!(metrics.map(|name| episode.metrics[name]), [0.5, 0.125, 3.]);
        assert_eq!(rollout.completion.tokens, spelled("so"));
    }
}

#[rstest]
#[case::of_the_rubric("rubric")]
#[case::of_the_harness("harness")]
fn an_error_excludes_the_trajectory(#[case] text: &str) {
    for rollout in run(text).unwrap() {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, episode.excluded), (&EpisodeEnd::Done, true));
        assert_eq!(episode.reward(), 0.);
    }
}

#[test]
fn an_exception_fails_its_trajectory() {
    for rollout in run("raises").unwrap() {
        let episode = rollout.episode.as_ref().unwrap();
        let EpisodeEnd::Failed(message) = &episode.end else {
            panic!("{episode:?}");
        };
        assert!(message.contains("no place"), "{message}");
        assert!(episode.excluded);
    }
}

#[test]
fn rows_have_the_numbers_of_tasks() {
    let output = Command::new("python3")
        .args(["-S", "-B", BRIDGE, "verifiers", "sums", "--rows", "2"])
        .args(["--config", r#"{"agent": {"runtime": {"type": "docker"}}}"#])
        .current_dir(FOLDER)
        .output()
        .unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let row = |idx: u64| json!({"idx": idx, "prompt": format!("What is {idx} + 5?")});
    assert_eq!(rows, [row(0), row(1)]);
}
