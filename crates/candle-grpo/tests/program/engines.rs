//! Runs whose completions come from a server.

use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;

use candle_grpo::config::{Document, RunConfig};
use candle_grpo_test_support::{HttpServer, Reply, Request};
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{CONFIG, folder, grpo, lines, said, succeeds};

/// A configuration with the section `rollout`.
fn with_rollout(rollout: &Value) -> String {
    format!("{CONFIG}\nrollout: {rollout}\n")
}

/// A server for a fixed policy that always answers "ab" and the stop token, as llama.cpp does.
pub(crate) fn fixed_policy() -> HttpServer {
    HttpServer::start(|request: &Request| {
        let answer = match request.path() {
            "/health" => json!({"status": "ok"}),
            "/v1/models" => json!({"data": [{"id": "policy", "meta": {"n_ctx": 64}}]}),
            "/v1/completions" => {
                let body: Value = serde_json::from_slice(&request.body).unwrap();
                assert!(body["prompt"].as_array().is_some_and(|ids| !ids.is_empty()));
                let token = |id: u32| json!({"id": id, "prob": 0.5});
                let probabilities = [token(1), token(2), token(0)];
                json!({"__verbose": {
                    "tokens": [1, 2, 0], "stop_type": "eos", "completion_probabilities": probabilities,
                }})
            }
            _ => return Reply::new(404, "{}"),
        };
        Reply::new(200, answer.to_string())
    })
}

#[test]
fn an_engine_without_new_weights_is_refused_in_training_alone() {
    let server = fixed_policy();
    let openai = |more: Value| {
        let mut rollout = json!({"engine": "openai", "base_url": server.url()});
        rollout
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        with_rollout(&rollout)
    };
    let folder = folder(&openai(json!({})));
    for command in ["check", "train"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        let must = "rollout.weight_sync: auto, must be none to train with engine openai";
        assert!(said(&output).contains(must), "{}", said(&output));
    }
    assert!(!folder.path().join("run").exists());

    let metrics = succeeds(
        folder.path(),
        &["eval", "run.yaml", "--out", "answers.jsonl"],
    );
    assert!(metrics.contains("answers"), "{metrics}");
    let answers = lines(&folder.path().join("answers.jsonl"));
    assert_eq!(answers.len(), 16);
    for answer in &answers {
        assert_eq!(answer["completion"], "ab", "{answer}");
    }

    // A teacher: the completions are those of the server, and the policy trains on them.
    let teacher = openai(json!({"weight_sync": "none"}));
    fs::write(folder.path().join("run.yaml"), teacher).unwrap();
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    assert_eq!(metrics.len(), 12);
    assert!(metrics.iter().all(|line| line["response_length"] == 3.));
    // The evaluations are of the policy; every answer of the teacher passes.
    let evaluations = lines(&folder.path().join("run/evaluations.jsonl"));
    assert!(evaluations[0]["reward_mean"].as_f64().unwrap() < 1.);
}

#[test]
fn a_server_that_never_answers_ends_the_run_and_another_engine_resumes_it() {
    let server = HttpServer::start(|_: &Request| Reply::closed());
    let rollout = json!({"engine": "vllm", "base_url": [server.url()], "server_timeout": 0.2});
    let folder = folder(&with_rollout(&rollout));
    let output = grpo(folder.path(), &["train", "run.yaml", "--quiet"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let error = said(&output);
    for part in ["no server is ready after 0.2 s", &server.url(), "attempts"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(no_weights(folder.path()));

    fs::write(folder.path().join("run.yaml"), CONFIG).unwrap();
    succeeds(folder.path(), &["train", "run.yaml", "--quiet", "--resume"]);
    assert_eq!(lines(&folder.path().join("run/metrics.jsonl")).len(), 12);
}

#[rstest]
#[case::full_size("f32", "float32")]
#[case::half_the_bytes("bf16", "bfloat16")]
fn servers_receive_whole_weights_in_the_compute_dtype(#[case] compute: &str, #[case] name: &str) {
    let folder = folder("");
    let written = folder.path().join("run/weights/policy-000000/config.json");
    let (sender, received) = channel();
    let server = HttpServer::start(move |_: &Request| {
        let config: Option<Value> =
            (fs::read(&written).ok()).and_then(|text| serde_json::from_slice(&text).ok());
        sender
            .send(config.map(|config| config["torch_dtype"].clone()))
            .unwrap();
        Reply::closed()
    });
    let rollout = json!({"engine": "vllm", "base_url": [server.url()], "server_timeout": 0.2});
    let config = format!("{}compute_dtype: {compute}\n", with_rollout(&rollout));
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    let output = grpo(folder.path(), &["train", "run.yaml", "--quiet"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    // They are complete before the first request.
    assert_eq!(received.recv().unwrap(), Some(json!(name)));
}

/// The weights for an engine are removed at the end.
fn no_weights(folder: &Path) -> bool {
    let entries = fs::read_dir(folder.join("run/weights"))
        .into_iter()
        .flatten();
    entries
        .flatten()
        .all(|entry| !entry.file_name().to_string_lossy().starts_with("policy-"))
}

#[test]
fn a_key_that_is_not_set_is_named() {
    let rollout = json!({
        "engine": "vllm",
        "base_url": "http://127.0.0.1:1",
        "api_key_env": "GRPO_TEST_KEY_THAT_IS_NOT_SET",
    });
    let folder = folder(&with_rollout(&rollout));
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_ne!(output.status.code(), Some(0));
    let must = "api_key_env: GRPO_TEST_KEY_THAT_IS_NOT_SET, must be the name of an environment variable that is set";
    assert!(said(&output).contains(must), "{}", said(&output));
}

/// A build with the feature `cuda` trains on a GPU.
#[test]
fn check_refuses_a_local_policy_that_draws_ahead_on_a_gpu() {
    let correction = "coef: 0.01}, rollout_correction: {weight: {max: 2.0}}";
    let config = CONFIG.replace("coef: 0.01}", correction) + "rollout: {max_staleness: 1}\n";
    let folder = folder(&config);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    let must = "run.yaml:15: rollout.max_staleness: 1, must be 0 with engine local on a GPU";
    let refused = candle_grpo::train::cuda_is_enabled();
    assert_eq!(output.status.success(), !refused, "{}", said(&output));
    assert_eq!(said(&output).contains(must), refused, "{}", said(&output));

    let config = Document::from_yaml(Path::new("run.yaml"), &config).unwrap();
    let config = RunConfig::new(&config).unwrap();
    config.check_device(false).unwrap();
    let error = config.check_device(true).unwrap_err().to_string();
    assert!(error.contains(must), "{error}");
}

/// A build with the feature `cuda` trains on a GPU.
#[test]
fn check_refuses_weights_over_nccl_from_the_cpu() {
    let rollout = json!({"engine": "vllm", "base_url": "http://a", "weight_sync": "nccl"});
    let config = with_rollout(&rollout);
    let folder = folder(&config);
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    let must = "rollout.weight_sync: nccl, must be auto, adapter or disk with a policy on the CPU";
    let refused = !candle_grpo::train::cuda_is_enabled();
    assert_eq!(output.status.success(), !refused, "{}", said(&output));
    assert_eq!(said(&output).contains(must), refused, "{}", said(&output));

    let config = Document::from_yaml(Path::new("run.yaml"), &config).unwrap();
    let config = RunConfig::new(&config).unwrap();
    config.check_device(true).unwrap();
    let error = config.check_device(false).unwrap_err().to_string();
    assert!(error.contains(must), "{error}");
}
