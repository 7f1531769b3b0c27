//! Environments of OpenEnv, through the bridge in Python.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use candle_grpo_test_support::{ClosedPort, Lines, cases};
use candle_grpo_train::environment::{
    EnvironmentLimits, Episode, EpisodeEnd, ProgramEnvironmentConfig, ProgramEnvironments,
};
use candle_grpo_train::{Rollout, SamplingConfig};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::limited;
use crate::common::{prompts, sampler, sampling, tokenizer};

const BRIDGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../examples/environments/bridge.py"
);
const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/train/environment");

/// A fake server, which ends with the test.
struct Server {
    child: Child,
    url: String,
    folder: TempDir,
}

impl Server {
    fn start(faults: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new("python3")
            .args([&format!("{TESTS}/fake_openenv.py"), faults])
            .arg(folder.path().join("counts.json"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let port = Lines::new(child.stdout.take().unwrap()).find("");
        Self {
            child,
            url: format!("http://127.0.0.1:{port}"),
            folder,
        }
    }

    fn counts(&self) -> Value {
        let text = fs::read_to_string(self.folder.path().join("counts.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Plays `count` trajectories with turns of at most two tokens.
fn play(url: &str, options: &[&str], program: &Value, count: usize) -> Vec<Rollout> {
    let mut command = vec!["python3", BRIDGE, "openenv", url, "--action", "message"];
    command.extend(["--observation", "text", "--text"]);
    command.extend(options);
    let mut config = json!({ "command": command });
    config
        .as_object_mut()
        .unwrap()
        .extend(program.as_object().unwrap().clone());
    let config: ProgramEnvironmentConfig = serde_json::from_value(config).unwrap();
    let environments = ProgramEnvironments::new(&config).unwrap();
    let limits = EnvironmentLimits {
        max_turn_tokens: Some(2),
        max_turns: 5,
        ..EnvironmentLimits::default()
    };
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let sampling = SamplingConfig {
        max_new_tokens: 16,
        ..sampling()
    };
    sampler(sampling)
        .with_environments(limited(environments, limits))
        .sample(&prompts, count / 2, 0)
        .unwrap()
}

fn text(tokens: &[u32]) -> String {
    let text = tokenizer().decode(tokens, true).unwrap();
    text.replace(' ', "")
}

/// Checks that the policy read its own session only, and returns the session's name.
fn assert_own_session(rollout: &Rollout, episode: &Episode) -> String {
    let prompt = text(&rollout.prompt_tokens);
    let name = prompt[prompt.len() - 5..].to_owned();
    for pair in episode.turns.windows(2) {
        let turn = text(&rollout.completion.tokens[pair[0].tokens.clone()]);
        let read = text(&rollout.completion.tokens[pair[0].tokens.end..pair[1].tokens.start]);
        assert_eq!(read, format!("{name}{turn}"));
    }
    name
}

#[test]
fn a_session_is_a_trajectory() {
    let server = Server::start("none");
    let rollouts = play(&server.url, &[], &json!({"workers": 2}), 8);
    let mut names = BTreeSet::new();
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        assert_eq!((&episode.end, episode.reward()), (&EpisodeEnd::Done, 2.));
        names.insert(assert_own_session(rollout, episode));
    }
    assert_eq!(names.len(), 8);
    let counts = server.counts();
    assert_eq!(
        (&counts["sessions"], &counts["most"]),
        (&json!(8), &json!(8))
    );
}

/// Faults at a start are tried again. Faults in a turn exclude their trajectory.
#[test]
fn faults_of_a_server_fail_their_trajectories_only() {
    let faults = "capacity,closed,status,wrong,lost,cut,text,list,error,state";
    let server = Server::start(faults);
    let count = cases(40, 2400) as usize;
    let program = json!({"workers": 4, "max_concurrent": 64});
    let rollouts = play(&server.url, &[], &program, count);
    assert_eq!(rollouts.len(), count);
    let (mut failed, mut names) = (0, BTreeSet::new());
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        match &episode.end {
            EpisodeEnd::Done => assert_eq!((episode.reward(), episode.turns.len()), (2., 2)),
            EpisodeEnd::Failed(message) => {
                assert!(message.contains("step: "), "{message}");
                assert!(episode.excluded && episode.reward() == 0.);
                failed += 1;
            }
            end => panic!("{end:?}"),
        }
        names.insert(assert_own_session(rollout, episode));
    }
    let counts = server.counts();
    assert!(
        failed > 0 && counts["fatal"] == failed,
        "{failed}: {counts}"
    );
    assert_eq!((names.len(), &counts["sessions"]), (count, &json!(count)));
}

#[rstest]
#[case::hangs("hang", "step: no answer within 0.3 seconds")]
#[case::has_no_place("capacity,always", "reset: CAPACITY_REACHED: no disk")]
fn a_server_that_does_not_answer_in_time_fails_the_trajectory(
    #[case] faults: &str,
    #[case] words: &str,
) {
    let server = Server::start(faults);
    let rollouts = play(&server.url, &["--timeout", "0.3"], &json!({}), 16);
    let episodes = rollouts.iter().map(|rollout| rollout.episode.as_ref());
    let failed = episodes.flatten().filter_map(|episode| match &episode.end {
        EpisodeEnd::Failed(message) => Some((message, episode.excluded)),
        _ => None,
    });
    let failed: Vec<_> = failed.collect();
    let as_expected = |(message, excluded): &&(&String, bool)| message.contains(words) && *excluded;
    assert!(failed.iter().any(|found| as_expected(&found)), "{failed:?}");
}

#[test]
fn a_server_that_is_absent_fails_each_trajectory() {
    let closed = ClosedPort::new();
    let rollouts = play(&closed.url(), &["--timeout", "0.1"], &json!({}), 2);
    for rollout in &rollouts {
        let episode = rollout.episode.as_ref().unwrap();
        let EpisodeEnd::Failed(message) = &episode.end else {
            panic!("{episode:?}");
        };
        assert!(
            message.contains(&closed.url()) && episode.excluded,
            "{message}"
        );
        // No token of the policy trains.
        assert_eq!(rollout.completion.written, Some(vec![false]));
    }
}

/// The bridge alone.
struct Bridge {
    child: Child,
    lines: Lines,
    id: u64,
}

impl Bridge {
    fn start(python: &str, folder: &Path, options: &[&str]) -> Self {
        let mut child = Command::new(python)
            .args([&[BRIDGE, "openenv"], options].concat())
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = Lines::new(child.stdout.take().unwrap());
        Self {
            child,
            lines,
            id: 0,
        }
    }

    /// Returns the answer of episode 7 to a request.
    fn ask(&mut self, request: Value) -> Value {
        self.id += 1;
        let mut all = json!({
            "id": self.id, "episode": 7, "seed": 3, "prompt": "", "columns": {"start": {"most": 1}},
        });
        let fields = all.as_object_mut().unwrap();
        fields.extend(request.as_object().unwrap().clone());
        let mut input = self.child.stdin.as_ref().unwrap();
        input.write_all(format!("{all}\n").as_bytes()).unwrap();
        let answer = self.lines.find("");
        let mut answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["id"].take(), self.id);
        answer.as_object_mut().unwrap().remove("id");
        answer
    }

    fn turn(&mut self, completion: &str) -> Value {
        self.ask(json!({"turn": 0, "completion": completion, "finish_reason": "stop"}))
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.child.stdin = None;
        let _ = self.child.wait();
    }
}

#[test]
fn the_policy_reads_why_an_action_is_invalid() {
    let server = Server::start("none");
    let options = [server.url.as_str(), "--json", "--text"];
    let mut bridge = Bridge::start("python3", Path::new(TESTS), &options);
    let start = bridge.ask(json!({"turn": null}));
    assert_eq!(start, json!({"text": "baaaa", "notify_end": true}));
    for (completion, words) in [
        ("{", "error: the action is not JSON: "),
        ("[]", "error: the action must be a JSON object"),
        (r#"{"message": "invalid"}"#, "error: no disk: "),
    ] {
        let answer = bridge.turn(completion);
        let text = answer["text"].as_str().unwrap();
        assert!(text.starts_with(words), "{text}");
        assert_eq!(answer["metrics"]["invalid_actions"], 1);
    }
    let answer = bridge.turn(r#"{"message": "€"}"#);
    assert_eq!(answer, json!({"text": "baaaa€", "reward": 1.}));
    assert_eq!(
        bridge.ask(json!({"turn": 0, "end": "max_turns"})),
        json!({})
    );
    let lost = bridge.turn(r#"{"message": "a"}"#);
    assert_eq!(lost, json!({"error": "the session is lost"}));
}

#[test]
#[ignore = "needs the Python package openenv: make test-agents"]
fn the_echo_environment_of_openenv_has_one_place() {
    let python = env::var("CANDLE_GRPO_OPENENV_PYTHON").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new(&python)
        .args(["-m", "openenv.cli", "init", "echo_env"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .status();
    assert!(made.unwrap().success());
    let app = ["--app", "echo_env.server.app:app", "--timeout", "30"];
    let options = [
        &app[..],
        &["--action", "message", "--observation", "echoed_message"],
    ]
    .concat();
    let mut bridge = Bridge::start(&python, folder.path(), &options);
    let said = |text: &str| json!([{"role": "user", "content": text}]);
    let start = bridge.ask(json!({"turn": null}));
    assert_eq!(start["messages"], said("Echo Env environment ready!"));
    let long = "ä".repeat(70_000);
    for (text, reward) in [("hello", 0.5), (long.as_str(), 1.)] {
        let answer = bridge.turn(text);
        assert_eq!(answer, json!({"messages": said(text), "reward": reward}));
    }
    // A second session has no place until the first one ends.
    let second = bridge.ask(json!({"turn": null, "episode": 8}));
    let message = second["error"].as_str().unwrap();
    assert!(message.contains("CAPACITY_REACHED"), "{message}");
    assert_eq!(
        bridge.ask(json!({"turn": 1, "end": "max_tokens"})),
        json!({})
    );
    let second = bridge.ask(json!({"turn": null, "episode": 8}));
    assert_eq!(second["messages"], start["messages"]);
}

#[test]
#[ignore = "needs the Python package openenv: make test-agents"]
fn the_policy_calls_tools_of_an_environment_of_openenv() {
    let python = env::var("CANDLE_GRPO_OPENENV_PYTHON").unwrap();
    let options = ["--app", "real_openenv:app", "--tools", "--reset", "start"];
    let mut bridge = Bridge::start(&python, Path::new(TESTS), &options);
    let start = bridge.ask(json!({"turn": null}));
    let text = start["messages"][0]["content"].as_str().unwrap();
    assert!(
        text.starts_with("What is 1 + 1?\n\nYou can call these tools:\n"),
        "{text}"
    );
    assert!(
        text.contains(r#"{"name": "add", "description": "Adds two numbers.", "#),
        "{text}"
    );
    let call = |name: &str, arguments: Value| {
        let call = json!({"name": name, "arguments": arguments});
        format!("<tool_call>{call}</tool_call>")
    };
    let add = call("add", json!({"a": 1, "b": 1}));
    let invalid = call("add", json!({"a": "x"}));
    let answer = bridge.turn(&format!(
        "{add}{invalid}{}<tool_call>{{</tool_call>",
        call("no", json!({}))
    ));
    let outputs: Vec<&str> = (0..4)
        .map(|i| answer["messages"][i]["content"].as_str().unwrap())
        .collect();
    assert_eq!(
        (outputs[0], &answer["messages"][0]["role"]),
        ("2", &json!("tool"))
    );
    assert!(
        outputs[1..]
            .iter()
            .all(|output| output.starts_with("error: ")),
        "{outputs:?}"
    );
    let answer = bridge.turn(&call("answer", json!({"value": 2})));
    assert_eq!(answer, json!({"reward": 1., "done": true}));
    // A turn without a call is the end, without a reward.
    bridge.ask(json!({"turn": null}));
    assert_eq!(bridge.turn("two"), json!({"done": true}));
}
