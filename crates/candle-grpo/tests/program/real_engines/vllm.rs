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

/// The settings of a run with the server.
fn rollout(server: &Server) -> Value {
    json!({
        "engine": "vllm",
        "base_url": server.url(),
        // The server starts for minutes on two cores.
        "server_timeout": 1800,
        "log_prob_tolerance": 1e-4,
    })
}

/// Starts a ten-step run, with the server and `more` keys.
fn train(folder: &Path, server: &Server, more: &[(&str, Value)]) -> Child {
    let keys = [
        ("/max_steps", json!(10)),
        ("/evaluation/every_steps", json!(10)),
        ("/rollout", rollout(server)),
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

/// Steps end before their last completions do, and updates arrive while they are sampled.
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn completions_of_vllm_continue_with_new_weights() {
    let server = start();
    let mut rollout = rollout(&server);
    rollout["max_staleness"] = json!(1);
    rollout["in_flight_updates"] = json!(true);
    rollout["partial"] = json!(true);
    let recipe = json!({
        "group_filter": {},
        "policy_loss": {"rollout_correction": {"weight": {"max": 2.}}},
    });
    let keys = |steps: usize, learning_rate: f64| {
        [
            ("/max_steps", json!(steps)),
            ("/evaluation/every_steps", json!(steps)),
            ("/rollout", rollout.clone()),
            ("/recipe", recipe.clone()),
            ("/old_log_probs", json!("recompute")),
            ("/optimizer/learning_rate", json!(learning_rate)),
        ]
    };
    // With fixed weights, the server's log-probs are the policy's, wherever a request has ended.
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &keys(4, 0.));
    let mut run = command(folder.path(), &["train", "run.json"]);
    assert!(run.status().unwrap().success());
    for step in lines(&folder.path().join("run/metrics.jsonl")) {
        let number = |name: &str| step[name].as_f64().unwrap();
        println!(
            "{} unfinished, k3 {}",
            number("unfinished_groups"),
            number("rollout_kl_k3")
        );
        assert!(number("unfinished_groups") > 0.);
        assert!(number("rollout_kl_k3") < 1e-6);
    }
    let folder = tempfile::tempdir().unwrap();
    let learning_rate = 2e-5;
    let run = train(folder.path(), &server, &keys(10, learning_rate));
    assert!(run.wait_with_output().unwrap().status.success());
    assert_learned(folder.path());
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    let staleness = metrics.iter().map(|step| {
        let number = |name: &str| step[name].as_f64().unwrap();
        (number("staleness_mean"), number("staleness_max"))
    });
    let staleness: Vec<(f64, f64)> = staleness.collect();
    println!("staleness: {staleness:?}");
    // Within the bound, and with several versions in a step.
    assert!(staleness.iter().all(|(_, max)| *max <= 5.));
    assert!(
        staleness
            .iter()
            .any(|(mean, max)| *mean < *max && *max >= 1.)
    );
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
