//! vLLM: `make test-vllm`.
//!
//! Each run compares the server's log-probs with the policy's after every update
//! (`log_prob_tolerance: 1e-4`), so a run that ends has passed all these comparisons.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use candle_grpo::train::Pretrained;

use super::{Server, model, rewards, tiny, write_config};
use crate::support::{command, grpo, lines, said, succeeds};

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

/// A recipe whose metrics compare the server's log-probs with the policy's.
fn corrected() -> Value {
    json!({
        "group_filter": {},
        "policy_loss": {"rollout_correction": {"weight": {"max": 2.}}},
    })
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
    let recipe = corrected();
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

/// Starts a server with a tiny model of `family`, and returns the model's folder. vLLM's attention
/// on the CPU needs heads of 32 numbers or more.
fn tiny_server(
    folder: &Path,
    family: &str,
    more: &Value,
    variables: &[(&str, &str)],
) -> (PathBuf, Server) {
    let tokens = Pretrained::load_without_weights(&model()).unwrap();
    let path = folder.join(family);
    let mut config = json!({"head_dim": 32});
    let keys = more.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(keys);
    tiny(&tokens, family, &config).save(&path).unwrap();
    let server = Server::start_with("vllm", &path, variables);
    (path, server)
}

/// Keys of a run in which each update changes all weights.
fn large_steps(model: &Path, rollout: Value, run_dir: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("/model", json!(model)),
        ("/max_steps", json!(3)),
        ("/evaluation/every_steps", Value::Null),
        ("/rollout", rollout),
        ("/rewards", json!([{"kind": "regex", "pattern": "e"}])),
        ("/recipe", corrected()),
        ("/old_log_probs", json!("recompute")),
        ("/optimizer/learning_rate", json!(1e-2)),
        ("/run_dir", json!(run_dir)),
    ]
}

/// vLLM renames and stacks the weights of the gated delta rule. On the CPU, it computes them in
/// bf16, with the published models' head size.
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn vllm_receives_qwen3_5() {
    let folder = tempfile::tempdir().unwrap();
    let more = json!({
        "layer_types": ["linear_attention", "linear_attention", "full_attention",
            "linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
            "partial_rotary_factor": 0.5},
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    });
    let variables = [("DTYPE", "bfloat16")];
    let (model, server) = tiny_server(folder.path(), "qwen3_5_text", &more, &variables);
    let mut rollout = rollout(&server);
    rollout["log_prob_tolerance"] = json!(0.1);
    let adapters = json!({"rank": 16, "alpha": 32.});
    // In this order, because adapters do not replace the weights under them.
    for (run_dir, adapters) in [("adapters", adapters), ("whole", Value::Null)] {
        rollout["check_weights"] = json!(adapters.is_null());
        let mut keys = large_steps(&model, rollout.clone(), run_dir);
        keys.push(("/compute_dtype", json!("bf16")));
        keys.push(("/adapters", adapters));
        write_config(folder.path(), &keys);
        succeeds(folder.path(), &["train", "run.json"]);
        for step in lines(&folder.path().join(run_dir).join("metrics.jsonl")) {
            let divergence = step["rollout_kl_k3"].as_f64().unwrap();
            println!("{run_dir}: k3 {divergence}");
            assert!(divergence < 0.05, "{divergence}");
        }
    }
}

/// vLLM 0.32 on the CPU computes the experts that it starts with as the policy does. It does not
/// pack new ones for its kernel, so their log-probs are wrong, and the run ends.
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn experts_that_vllm_does_not_pack_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let more = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": true});
    let (model, server) = tiny_server(folder.path(), "qwen3_moe", &more, &[("LORA", "")]);
    let mut fixed = rollout(&server);
    fixed["weight_sync"] = json!("none");
    let mut keys = large_steps(&model, fixed, "fixed");
    keys.push(("/optimizer/learning_rate", json!(0.)));
    write_config(folder.path(), &keys);
    succeeds(folder.path(), &["train", "run.json"]);
    for step in lines(&folder.path().join("fixed/metrics.jsonl")) {
        let divergence = step["rollout_kl_k3"].as_f64().unwrap();
        println!("k3 {divergence}");
        assert!(divergence.abs() < 1e-6, "{divergence}");
    }
    write_config(
        folder.path(),
        &large_steps(&model, rollout(&server), "whole"),
    );
    let output = grpo(folder.path(), &["train", "run.json"]);
    let said = said(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("it serves other weights"), "{said}");
}

/// The teacher has the policy's initial weights, so their log-probs agree in the first step.
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn vllm_is_a_teacher() {
    let server = Server::start_with("vllm", &model(), &[("LORA", "")]);
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

/// The base model and two adapters are sampled from at the same time, before and after the server
/// loses its adapters. `grpo serve` compares log-probs each time that it opens one.
#[cfg(feature = "tinker")]
#[test]
#[ignore = "needs vLLM: make test-vllm"]
fn vllm_samples_for_clients_of_tinker() {
    use crate::tinker::{create_model_of, post, result, serve_with};

    let mut server = start();
    server.wait();
    let folder = tempfile::tempdir().unwrap();
    let path = model().display().to_string();
    std::os::unix::fs::symlink(&path, folder.path().join("model")).unwrap();
    let url = server.url();
    let options = ["--engine", "vllm", "--engine-base-url", &url];
    let (running, url) = serve_with(folder.path(), &options);
    let call = |name: &str, body: &Value| {
        let promise = post(&url, name, body).unwrap();
        result(&url, &promise).unwrap()
    };
    // "The capital of France is Paris."
    let text = [504_u32, 3575, 282, 4649, 314, 7042, 30];
    let data = json!([{
        "model_input": {"chunks": [{"tokens": text[..6]}]},
        "loss_fn_inputs": {"target_tokens": {"data": text[1..], "dtype": "int64"}},
    }]);
    let trained = |seed: u64, learning_rate: f64| {
        let model = create_model_of(&url, 8, seed);
        let input = json!({"loss_fn": "cross_entropy", "data": data});
        for step in 0..4 {
            let of = |seq: u64| json!({"model_id": model, "seq_id": 2 * step + seq});
            let mut pass = of(1);
            pass["forward_backward_input"] = input.clone();
            call("forward_backward", &pass);
            let mut update = of(2);
            update["adam_params"] = json!({"learning_rate": learning_rate});
            call("optim_step", &update);
        }
        let save = json!({"model_id": model, "seq_id": 9, "path": "a"});
        call("save_weights_for_sampler", &save)["path"].clone()
    };
    let weights = [Value::Null, trained(1, 1e-3), trained(2, 3e-3)];
    let sample = || {
        let promises = weights.iter().map(|weights| {
            let mut body = json!({
                "num_samples": 4, "prompt_logprobs": true,
                "prompt": {"chunks": [{"tokens": text[..5]}]},
                "sampling_params": {"max_tokens": 16, "temperature": 0.8, "top_p": 0.9},
            });
            match weights {
                Value::Null => body["base_model"] = json!("model"),
                path => body["model_path"] = path.clone(),
            }
            post(&url, "asample", &body).unwrap()
        });
        let promises: Vec<Value> = promises.collect();
        let samples = promises
            .iter()
            .map(|promise| result(&url, promise).unwrap());
        samples.collect::<Vec<_>>()
    };
    let prompts = |samples: &[Value]| -> Vec<Value> {
        let log_probs = samples.iter().map(|one| one["prompt_logprobs"].clone());
        log_probs.collect()
    };
    let before = sample();
    println!("{before:?}");
    for samples in &before {
        assert_eq!(
            samples["sequences"].as_array().unwrap().len(),
            4,
            "{samples}"
        );
    }
    server.kill();
    server.restart();
    let after = sample();
    for samples in &after {
        assert_eq!(
            samples["sequences"].as_array().unwrap().len(),
            4,
            "{samples}"
        );
    }
    let (before, after) = (prompts(&before), prompts(&after));
    assert_eq!(before, after);
    assert!(before[0] != before[1] && before[1] != before[2]);
    drop(running);
}
