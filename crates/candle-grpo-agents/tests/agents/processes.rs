//! Agents that the server starts.

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use candle_grpo_rewards::program::{IsolationConfig, Network};
use candle_grpo_test_support::AGENT_START;
use candle_grpo_train::FinishReason;
use candle_grpo_train::environment::{AgentConfig, EnvironmentLimits, EpisodeEnd};
use candle_grpo_train::rollout::{PromptRequest, Rollout};
use rstest::rstest;
use tempfile::TempDir;

use super::drawer::{Draw, agents, limits, play, prompt, sampling, spelled};

/// The functions of the agents.
const FUNCTIONS: &str = r#"
def ask(text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]
def reward(**body):
    post(os.environ["GRPO_EPISODE_URL"] + "/reward", body)
"#;

/// Plays two episodes with a Python agent.
fn run(
    script: &str,
    change: impl FnOnce(&mut AgentConfig, &mut EnvironmentLimits),
) -> (Vec<Rollout>, Vec<Draw>) {
    let folder = TempDir::new().unwrap();
    fs::write(
        folder.path().join("agent.py"),
        format!("{AGENT_START}{FUNCTIONS}\n{script}"),
    )
    .unwrap();
    let mut config = AgentConfig {
        command: ["python3", "-S", "agent.py"].map(str::to_owned).to_vec(),
        folder: Some(folder.path().to_owned()),
        ..AgentConfig::default()
    };
    let mut limits = limits();
    change(&mut config, &mut limits);
    let agents = agents(config, limits);
    let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled("so"), FinishReason::StopToken);
    let (rollouts, draws) = play(&agents, &prompt("so?"), 2, &sampling(), &policy);
    (rollouts.unwrap(), draws)
}

fn reward(rollout: &Rollout) -> f64 {
    let turns = &rollout.episode.as_ref().unwrap().turns;
    turns.iter().map(|turn| turn.reward).sum()
}

#[rstest]
fn a_process_plays_an_episode(#[values(1, 2)] max_concurrent: usize) {
    let script = r#"
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
assert "HF_TOKEN" not in os.environ
print("noise" * 100000)
reward(value=float(ask(row["question"]) == "so"), metrics={"tries": 1})
"#;
    let (rollouts, draws) = run(script, |config, _| config.max_concurrent = max_concurrent);
    assert_eq!(draws.len(), 2);
    let samples: Vec<usize> = rollouts
        .iter()
        .map(|rollout| rollout.sample_index)
        .collect();
    assert_eq!(samples, [0, 1]);
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!(episode.end, EpisodeEnd::Done);
        assert_eq!((reward(rollout), episode.metrics["tries"]), (1., 1.));
        assert_eq!(rollout.prompt_tokens, prompt("so?").tokens);
        assert_eq!(rollout.completion.tokens, spelled("so"));
    }
}

#[rstest]
#[case::dies("ask('so?')\nreward(value=1)\nsys.exit('out of luck')", "out of luck")]
#[case::dies_at_once("sys.exit('no config')", "no config")]
#[case::never_reports("ask('so?')", "without a reward")]
#[case::never_asks("reward(value=1)", "without an answer")]
#[case::hangs(
    "import time\nask('so?')\nreward(value=1)\ntime.sleep(1000)",
    "0.5 seconds"
)]
fn a_failed_agent_is_excluded_or_scored(#[case] script: &str, #[case] words: &str) {
    for failure_reward in [None, Some(-1.)] {
        let (rollouts, _) = run(script, |config, limits| {
            config.time_limit_seconds = if words.contains("seconds") { 0.5 } else { 100. };
            limits.failure_reward = failure_reward;
        });
        for rollout in &rollouts {
            let episode = rollout.episode.as_ref().unwrap();
            let EpisodeEnd::Failed(message) = &episode.end else {
                panic!("{episode:?}");
            };
            assert!(message.contains(words), "{message}");
            assert_eq!(episode.excluded, failure_reward.is_none());
            assert_eq!(reward(rollout), failure_reward.unwrap_or(0.));
        }
    }
}

#[test]
fn an_episode_without_an_answer_has_no_token_of_the_policy() {
    for failure_reward in [None, Some(-1.)] {
        let (rollouts, draws) = run("", |config, limits| {
            config.reports_rewards = false;
            limits.failure_reward = failure_reward;
        });
        assert_eq!((rollouts.len(), draws.len()), (2, 0));
        for rollout in &rollouts {
            let episode = rollout.episode.as_ref().unwrap();
            assert!(matches!(episode.end, EpisodeEnd::Failed(_)));
            assert_eq!(episode.excluded, failure_reward.is_none());
            assert_eq!(episode.gives_rewards, failure_reward.is_some());
            assert_eq!(rollout.completion.written, Some(vec![false]));
        }
    }
}

#[test]
fn an_agent_that_a_limit_ends_has_not_failed() {
    let script = "ask('so?')\nreward(value=0.5)\nask('again')";
    let (rollouts, draws) = run(script, |_, limits| limits.max_turns = 1);
    assert_eq!(draws.len(), 2);
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!(
            (&episode.end, reward(rollout)),
            (&EpisodeEnd::MaxTurns, 0.5)
        );
    }
}

#[test]
fn an_agent_that_crashes_at_its_start_begins_again() {
    let script = r#"
try:
    os.close(os.open(os.environ["GRPO_EPISODE_URL"].rsplit("/", 1)[1], os.O_CREAT | os.O_EXCL))
    sys.exit("first")
except FileExistsError:
    ask("so?")
    reward(value=1)
"#;
    let (rollouts, _) = run(script, |_, _| {});
    assert!(rollouts.iter().all(|rollout| reward(rollout) == 1.));
}

#[test]
fn what_an_agent_has_started_ends_with_it() {
    // The child would hold the pipe, and answer the policy forever.
    let script = r#"
import subprocess
subprocess.Popen(["sleep", "1000"])
ask("so?")
reward(value=1)
"#;
    let (rollouts, draws) = run(script, |_, _| {});
    assert!(rollouts.iter().all(|rollout| reward(rollout) == 1.));
    assert_eq!(draws.len(), 2);
    assert_eq!(rollouts[0].completion.tokens, spelled("so"));
}

#[test]
fn a_command_that_does_not_exist_ends_the_run() {
    let config = AgentConfig {
        command: vec!["no-such-agent".to_owned()],
        ..AgentConfig::default()
    };
    let agents = agents(config, limits());
    let policy = |_: &PromptRequest<'_>, _: &[String]| (spelled("so"), FinishReason::StopToken);
    let (rollouts, _) = play(&agents, &prompt("so?"), 2, &sampling(), &policy);
    let error = format!("{:#}", rollouts.unwrap_err());
    assert!(error.contains("no-such-agent"), "{error}");
}

fn isolated(network: Network) -> Option<IsolationConfig> {
    Some(IsolationConfig {
        network,
        ..IsolationConfig::default()
    })
}

#[rstest]
#[case(Network::Loopback)]
#[case(Network::Host)]
fn an_isolated_agent_calls_the_server(#[case] network: Network) {
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = elsewhere.local_addr().unwrap().port();
    let script = format!(
        "
import socket
open(os.path.expanduser('~/new'), 'w')
try:
    socket.create_connection(('127.0.0.1', {port}), 5)
    connects = 1
except OSError:
    connects = 0
ask('so?')
reward(value=1, metrics={{'connects': connects}})"
    );
    let mut lacks = None;
    let (rollouts, _) = run(&script, |config, _| {
        let folder = config.folder.as_ref().unwrap();
        // Root's programs run as another user.
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        config.isolation = isolated(network);
        let mut strict = config.clone();
        strict.isolation.as_mut().unwrap().require_isolation = true;
        lacks = strict.check_files().err();
    });
    if let Some(lacks) = &lacks {
        eprintln!("not tried: {lacks:#}");
    }
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, reward(rollout)), (&EpisodeEnd::Done, 1.));
        let connects = network == Network::Host || lacks.is_some();
        assert_eq!(episode.metrics["connects"], f64::from(u8::from(connects)));
    }
}

#[rstest]
#[case::no_network(
    AgentConfig { isolation: isolated(Network::None), ..agent() },
    "isolation.network: none, must be loopback or host"
)]
#[case::no_command(
    AgentConfig { isolation: isolated(Network::Host), command: Vec::new(), ..agent() },
    "isolation: given, must be absent without a command"
)]
#[case::another_address(
    AgentConfig {
        isolation: isolated(Network::Loopback),
        listen: ([192, 0, 2, 1], 8000).into(),
        ..agent()
    },
    "listen: 192.0.2.1:8000, must be a loopback address"
)]
fn an_isolated_agent_must_reach_the_server(#[case] config: AgentConfig, #[case] words: &str) {
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

fn agent() -> AgentConfig {
    AgentConfig {
        command: vec!["true".to_owned()],
        ..AgentConfig::default()
    }
}
