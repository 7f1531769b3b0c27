//! Agents' processes that play several episodes.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use candle_grpo_rewards::program::{IsolationConfig, Network};
use candle_grpo_train::FinishReason;
use candle_grpo_train::environment::{AgentConfig, EpisodeEnd, SessionScope};
use candle_grpo_train::rollout::{PromptRequest, Rollout};
use rstest::rstest;
use tempfile::TempDir;

use super::drawer::{agents, limits, play, prompt, sampling, spelled};

/// Plays episodes until it is killed. `played` is the number of those before.
const LOOP: &str = r#"
import json, os, sys, urllib.request
def post(url, body, key):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    return json.loads(answer) if answer else None
played = 0
while True:
    episode = post(os.environ["GRPO_EPISODES_URL"], {}, os.environ["GRPO_API_KEY"])
    if not episode: continue
    def say(text):
        body = {"model": "any", "messages": [{"role": "user", "content": text}]}
        return post(episode["base_url"] + "/chat/completions", body, episode["api_key"])
    def reward(**body):
        post(episode["reward_url"], body, episode["api_key"])
    PLAY
    played += 1
"#;

/// Plays `count` episodes in two batches.
fn run(body: &str, workers: usize, count: u64) -> anyhow::Result<Vec<Rollout>> {
    run_isolated(body, workers, count, None)
}

fn run_isolated(
    body: &str,
    workers: usize,
    count: u64,
    isolation: Option<IsolationConfig>,
) -> anyhow::Result<Vec<Rollout>> {
    let folder = TempDir::new().unwrap();
    // Root's isolated programs run as another user.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::write(folder.path().join("agent.py"), LOOP.replace("PLAY", body)).unwrap();
    let config = AgentConfig {
        command: ["python3", "-S", "agent.py"].map(str::to_owned).to_vec(),
        folder: Some(folder.path().to_owned()),
        session: SessionScope::Shared,
        workers,
        isolation,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled("so"), FinishReason::StopToken);
    let mut all = Vec::new();
    for _ in 0..2 {
        let (rollouts, _) = play(&agents, &prompt("so?"), count / 2, &sampling(), &policy);
        all.extend(rollouts?);
    }
    Ok(all)
}

#[rstest]
#[case(1)]
#[case(3)]
fn a_process_plays_many_episodes(#[case] workers: usize) {
    let body = "say(\"so?\")\n    reward(value=1, metrics={\"process\": os.getpid()}, done=True)";
    let rollouts = run(body, workers, 12).unwrap();
    let mut processes = Vec::new();
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, episode.reward()), (&EpisodeEnd::Done, 1.));
        processes.push(episode.metrics["process"] as u64);
    }
    processes.sort_unstable();
    processes.dedup();
    assert!((1..=workers).contains(&processes.len()), "{processes:?}");
}

#[test]
fn an_isolated_process_plays_many_episodes() {
    let isolation = IsolationConfig {
        network: Network::Loopback,
        ..IsolationConfig::default()
    };
    let body = "say(\"so?\")\n    open(os.path.expanduser(\"~/new\"), \"w\")\n    reward(value=1, done=True)";
    let rollouts = run_isolated(body, 2, 8, Some(isolation)).unwrap();
    assert_eq!(rollouts.len(), 8);
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, episode.reward()), (&EpisodeEnd::Done, 1.));
    }
}

#[test]
fn a_process_that_ends_fails_its_episodes_and_starts_again() {
    let body =
        "say(\"so?\")\n    if played == 2: sys.exit(\"no memory\")\n    reward(value=1, done=True)";
    let rollouts = run(body, 1, 12).unwrap();
    let episodes = rollouts
        .iter()
        .filter_map(|rollout| rollout.episode.as_ref());
    let failed: Vec<_> = episodes
        .filter_map(|episode| match &episode.end {
            EpisodeEnd::Failed(message) => Some((message, episode.excluded)),
            _ => None,
        })
        .collect();
    // Each process plays two.
    assert_eq!(failed.len(), 4);
    for (message, excluded) in failed {
        assert!(message.contains("no memory") && excluded, "{message}");
    }
}

#[test]
fn a_process_that_requests_no_episode_ends_the_run() {
    let folder = TempDir::new().unwrap();
    let config = AgentConfig {
        command: ["sh", "-c", "echo no module >&2"]
            .map(str::to_owned)
            .to_vec(),
        folder: Some(folder.path().to_owned()),
        session: SessionScope::Shared,
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled("so"), FinishReason::StopToken);
    let (rollouts, _) = play(&agents, &prompt("so?"), 2, &sampling(), &policy);
    let error = format!("{:#}", rollouts.unwrap_err());
    assert!(
        error.contains("no module") && error.contains("requested no episode"),
        "{error}"
    );
}

#[test]
fn only_programs_are_shared() {
    let shared = AgentConfig {
        session: SessionScope::Shared,
        ..AgentConfig::default()
    };
    let error = shared.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("session: shared, must be absent"),
        "{error}"
    );
    let workers = AgentConfig {
        command: vec!["true".to_owned()],
        workers: 2,
        ..AgentConfig::default()
    };
    let error = workers.validate().unwrap_err().to_string();
    assert_eq!(error, "workers: 2, must be 1 without session: shared");
}
