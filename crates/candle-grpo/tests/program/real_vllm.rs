//! Training with completions from a real vLLM on the CPU: `make test-vllm`.
//!
//! Each run compares the log-probs of the server with the policy's after every update
//! (`log_prob_tolerance: 1e-4`), so a run that ends has passed all of these comparisons.

use std::env;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{command, lines};

/// A server that ends with the value.
struct Vllm {
    child: Child,
    port: u16,
}

impl Vllm {
    fn start(port: u16) -> Self {
        let script = env::var("GRPO_VLLM").expect("GRPO_VLLM: run this by make test-vllm");
        let child = Command::new(script)
            .args(["serve".as_ref(), model().as_os_str()])
            .arg(port.to_string())
            .spawn()
            .unwrap();
        Self { child, port }
    }

    fn kill(&mut self) {
        // The server ends its engine on this signal; SIGKILL would leave it.
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.kill();
        }
    }
}

fn model() -> PathBuf {
    let model = env::var_os("GRPO_VLLM_MODEL");
    model
        .expect("GRPO_VLLM_MODEL: run this by make test-vllm")
        .into()
}

/// A port that is free now.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts the example addition-llm for `steps` steps, with the server and `more` keys.
fn train(folder: &Path, server: &Vllm, steps: usize, more: &[(&str, &str, Value)]) -> Child {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let example = root.join("examples/addition-llm");
    let text = fs::read_to_string(example.join("run.yaml")).unwrap();
    let config = candle_grpo::config::RunConfig::new(
        &candle_grpo::config::Document::from_yaml(Path::new("run.yaml"), &text).unwrap(),
    );
    let mut config = config.unwrap().to_value().unwrap();
    config["model"] = json!(model());
    config["run_dir"] = json!("run");
    config["max_steps"] = json!(steps);
    config["data"]["train"] = json!([example.join("train.jsonl")]);
    config["data"]["held_out"] = json!([example.join("held_out.jsonl")]);
    config["evaluation"]["every_steps"] = json!(steps);
    config["rollout"] = json!({
        "engine": "vllm",
        "base_url": format!("http://127.0.0.1:{}", server.port),
        // The server starts for minutes on two cores.
        "server_timeout": 1800,
        "log_prob_tolerance": 1e-4,
    });
    for (section, key, value) in more {
        config[section][key] = value.clone();
    }
    let file = folder.join("run.json");
    fs::write(&file, config.to_string()).unwrap();
    command(folder, &["train", "run.json"]).spawn().unwrap()
}

/// The share of correct held-out answers at each evaluation.
fn rewards(folder: &Path) -> Vec<f64> {
    let evaluations = lines(&folder.join("run/evaluations.jsonl"));
    let reward = |line: &Value| line["reward_mean"].as_f64().unwrap();
    evaluations.iter().map(reward).collect()
}

/// The number of steps that have metrics.
fn steps(folder: &Path) -> usize {
    let metrics = fs::read_to_string(folder.join("run/metrics.jsonl"));
    metrics.unwrap_or_default().lines().count()
}

#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn all_weights_learn_from_completions_of_vllm() {
    let server = Vllm::start(free_port());
    let folder = tempfile::tempdir().unwrap();
    let mut run = train(folder.path(), &server, 10, &[]);
    assert!(run.wait().unwrap().success());
    let rewards = rewards(folder.path());
    println!("held out: {rewards:?}");
    assert!(rewards[1] > rewards[0] + 0.2, "{rewards:?}");
}

#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn adapters_learn_from_completions_of_vllm_that_is_killed_and_comes_back() {
    let mut server = Vllm::start(free_port());
    let folder = tempfile::tempdir().unwrap();
    let adapters = json!({"rank": 16, "alpha": 32.});
    let more = [
        ("training", "adapters", adapters),
        ("optimizer", "learning_rate", json!(5e-4)),
    ];
    let mut run = train(folder.path(), &server, 10, &more);
    while steps(folder.path()) < 4 {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        thread::sleep(Duration::from_millis(200));
    }
    // The fifth step draws now, or is about to.
    thread::sleep(Duration::from_secs(1));
    server.kill();
    assert!(run.try_wait().unwrap().is_none(), "the run has ended");
    server = Vllm::start(server.port);
    assert!(run.wait().unwrap().success());
    let rewards = rewards(folder.path());
    println!("held out: {rewards:?}");
    assert!(rewards[1] > rewards[0] + 0.2, "{rewards:?}");
    drop(server);
}
