//! vLLM: `make test-vllm`.
//!
//! Each run compares the server's log-probs with the policy's after every update
//! (`log_prob_tolerance: 1e-4`), so a run that ends has passed all these comparisons.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use super::{Server, model, rewards, write_config};
use crate::support::{command, lines};

fn start() -> Server {
    Server::start("vllm", &model())
}

/// Starts a ten-step run, with the server and `more` keys.
fn train(folder: &Path, server: &Server, more: &[(&str, Value)]) -> Child {
    let rollout = json!({
        "engine": "vllm",
        "base_url": server.url(),
        // The server starts for minutes on two cores.
        "server_timeout": 1800,
        "log_prob_tolerance": 1e-4,
    });
    let keys = [
        ("/max_steps", json!(10)),
        ("/evaluation/every_steps", json!(10)),
        ("/rollout", rollout),
    ];
    write_config(folder, &[&keys, more].concat());
    let mut command = command(folder, &["train", "run.json"]);
    command.stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns how many steps have metrics.
fn steps(folder: &Path) -> usize {
    let metrics = fs::read_to_string(folder.join("run/metrics.jsonl"));
    metrics.unwrap_or_default().lines().count()
}

fn assert_learned(folder: &Path) {
    let rewards = rewards(folder);
    println!("held out: {rewards:?}");
    assert!(rewards[1] > rewards[0] + 0.2, "{rewards:?}");
    assert_eq!(steps(folder), 10);
}

#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn all_weights_learn_from_completions_of_vllm() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    let run = train(folder.path(), &server, &[]);
    assert!(run.wait_with_output().unwrap().status.success());
    assert_learned(folder.path());
}

#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn adapters_learn_from_completions_of_vllm_that_is_killed_and_comes_back() {
    let mut server = start();
    let folder = tempfile::tempdir().unwrap();
    let more = [
        ("/adapters", json!({"rank": 16, "alpha": 32.})),
        ("/optimizer/learning_rate", json!(5e-4)),
    ];
    let mut run = train(folder.path(), &server, &more);
    // A closed stdout does not end the run.
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let fourth = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("step 4/")));
    assert!(fourth.is_some(), "the run has ended");
    // The fifth step draws now, or is about to.
    server.kill();
    server.restart();
    assert!(run.wait().unwrap().success());
    assert_learned(folder.path());
    drop(server);
}

/// The teacher has the policy's initial weights, so their log-probs agree in the first step.
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn vllm_is_a_teacher() {
    let server = Server::start_with("vllm", &model(), &[("TEACHER", "1")]);
    let folder = tempfile::tempdir().unwrap();
    let teacher = json!({"server": {
        "engine": "vllm", "base_url": server.url(), "server_timeout": 1800,
    }});
    // Of the sampled tokens, and of the most likely ones.
    let recipe = json!({
        "policy_loss": {"surrogate": "policy_gradient", "distillation": {"coef": 1.},
            "aggregation": "token-mean"},
        "distillation_loss": {"support": {"teacher": {"k": 20}}},
    });
    let keys = [
        ("/max_steps", json!(3)),
        ("/teacher", teacher),
        ("/recipe", recipe),
        // One update a step, so that the gap of a step is that before its update.
        ("/mini_batch_size", Value::Null),
        ("/optimizer/learning_rate", json!(1e-4)),
        ("/sampling/temperature", json!(1.)),
    ];
    write_config(folder.path(), &keys);
    let mut run = command(folder.path(), &["train", "run.json"])
        .spawn()
        .unwrap();
    assert!(run.wait().unwrap().success());
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    let gap = |step: usize| metrics[step]["distillation_gap_abs"].as_f64().unwrap();
    println!("gaps: {} {} {}", gap(0), gap(1), gap(2));
    assert!(gap(0) < 1e-4, "{}", gap(0));
    assert!(gap(2) > 10. * gap(0), "{} {}", gap(0), gap(2));
    let number = |step: usize, name: &str| metrics[step][name].as_f64().unwrap();
    let mass = |step: usize| number(step, "student_mass") - number(step, "teacher_mass");
    println!(
        "divergences: {} {}",
        number(0, "divergence"),
        number(2, "divergence")
    );
    assert!(number(0, "divergence").abs() < 1e-5 && mass(0).abs() < 1e-5);
    assert!(number(2, "divergence") > 1e-3);
}
