//! Tests the fake servers themselves, with plain requests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use candle_grpo_nn::{Export, Parameters};
use candle_grpo_test_support::Reply;
use rstest::rstest;
use serde_json::{Value, json};

use super::fake_server::{FakeServer, Fault};
use super::served_policy::LogProbs;
use super::{adapters, fake_sglang, fake_vllm, scaled, served};
use crate::common::{END, model, parameters, pretrained};

/// Sends a request on a new connection. The status is 0 if there is no answer.
fn call(server: &FakeServer, method: &str, target: &str, body: &Value) -> (u16, Value) {
    let address = server.url().replace("http://", "");
    let mut stream = TcpStream::connect(address).unwrap();
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nauthorization: Bearer key\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return (0, Value::Null);
    };
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_default())
}

fn post(server: &FakeServer, target: &str, body: Value) -> (u16, Value) {
    call(server, "POST", target, &body)
}

/// Other weights than the initial ones, as a Hugging Face directory.
fn other_weights(folder: &Path) -> Parameters {
    let parameters = scaled(&model(), &parameters(), 1.5);
    pretrained()
        .write_files(&Export::new(&parameters), folder)
        .unwrap();
    parameters
}

/// An adapter as a PEFT directory, and the initial weights with it.
fn adapter(folder: &Path) -> Parameters {
    let adapters = adapters(1);
    adapters.save(folder, None).unwrap();
    adapters.merged(&model(), &parameters()).unwrap()
}

const PROMPT: [u32; 3] = [1, 2, 3];

fn vllm_request(model: &str) -> Value {
    json!({
        "model": model, "prompt": PROMPT, "n": 2, "max_tokens": 8, "temperature": 0.5, "top_p": 1,
        "top_k": 0, "min_p": 0, "seed": 7, "logprobs": 0, "return_token_ids": true,
        "stop_token_ids": [END],
    })
}

fn sglang_request(adapter: Option<&str>) -> Value {
    let sampling = json!({
        "n": 2, "max_new_tokens": 8, "temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0,
        "sampling_seed": 7, "stop_token_ids": [END],
    });
    json!({
        "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": true,
        "lora_path": adapter,
    })
}

/// Completions and their log-probs.
type Answers = Vec<(Vec<u32>, Vec<f32>)>;

fn vllm_answers(answer: &Value) -> Answers {
    let choices = answer["choices"].as_array().unwrap();
    choices
        .iter()
        .map(|choice| {
            let read = |value: &Value| serde_json::from_value(value.clone()).unwrap();
            let log_probs = &choice["logprobs"]["token_logprobs"];
            let log_probs = serde_json::from_value(log_probs.clone()).unwrap();
            (read(&choice["token_ids"]), log_probs)
        })
        .collect()
}

fn sglang_answers(answer: &Value) -> Answers {
    let answers = answer.as_array().unwrap();
    answers
        .iter()
        .map(|answer| {
            let entries = answer["meta_info"]["output_token_logprobs"].clone();
            let entries: Vec<(f32, u32, Value)> = serde_json::from_value(entries).unwrap();
            let ids = serde_json::from_value(answer["output_ids"].clone()).unwrap();
            (ids, entries.iter().map(|entry| entry.0).collect())
        })
        .collect()
}

/// Largest difference between a server's log-probs and those under `parameters`.
fn difference(answers: &Answers, parameters: &Parameters, temperature: f64) -> f32 {
    let answers = answers
        .iter()
        .map(|(ids, log_probs)| (&PROMPT[..], ids, log_probs));
    super::difference(answers, parameters, temperature)
}

#[rstest]
#[case(LogProbs::Raw, 1.)]
#[case(LogProbs::Processed, 0.5)]
fn vllm_draws_from_the_weights_that_it_read_last(
    #[case] log_probs: LogProbs,
    #[case] temperature: f64,
) {
    let server = fake_vllm::start(served(log_probs));
    let draw = |model: &str| {
        let (status, answer) = post(&server, "/v1/completions", vllm_request(model));
        assert_eq!(status, 200, "{answer}");
        vllm_answers(&answer)
    };
    let start = draw("policy");
    assert_eq!(start, draw("policy"), "the same seed");
    assert_ne!(start[0], start[1], "the seeds of one request");
    assert!(difference(&start, &parameters(), temperature) < 1e-5);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let merged = adapter(path);
    let load = json!({"lora_name": "ad", "lora_path": path});
    let unknown = post(&server, "/v1/completions", vllm_request("ad"));
    assert_eq!(unknown.0, 404, "{unknown:?}");
    assert_eq!(post(&server, "/v1/load_lora_adapter", load.clone()).0, 200);
    assert_eq!(post(&server, "/v1/load_lora_adapter", load).0, 400);
    let replace = json!({"lora_name": "ad", "lora_path": path, "load_inplace": true});
    assert_eq!(post(&server, "/v1/load_lora_adapter", replace).0, 200);
    assert!(difference(&draw("ad"), &merged, temperature) < 1e-5);
    assert_eq!(draw("policy"), start);

    let other = other_weights(path);
    let reload = json!({"method": "reload_weights", "kwargs": {"weights_path": path}});
    assert_eq!(post(&server, "/collective_rpc", reload).0, 200);
    assert!(difference(&draw("policy"), &other, temperature) < 1e-5);
    assert!(difference(&draw("policy"), &parameters(), temperature) > 0.1);

    server.restart();
    assert_eq!(draw("policy"), start);
    let gone = json!({"lora_name": "ad"});
    assert_eq!(post(&server, "/v1/unload_lora_adapter", gone).0, 404);
}

#[test]
fn a_failed_reload_ends_vllm_at_the_next_completion() {
    let server = fake_vllm::start(served(LogProbs::Raw));
    let reload = json!({"method": "reload_weights", "kwargs": {"weights_path": "/none"}});
    assert_eq!(post(&server, "/collective_rpc", reload).0, 500);
    let health = || call(&server, "GET", "/health", &Value::Null).0;
    assert_eq!(health(), 200);
    assert_eq!(
        post(&server, "/v1/completions", vllm_request("policy")).0,
        0
    );
    assert_eq!(health(), 0);
    server.restart();
    assert_eq!(
        post(&server, "/v1/completions", vllm_request("policy")).0,
        200
    );
}

#[test]
fn a_pause_holds_the_completions_of_vllm() {
    let server = fake_vllm::start(served(LogProbs::Raw));
    assert_eq!(post(&server, "/pause?mode=keep", Value::Null).0, 200);
    assert_eq!(post(&server, "/pause?mode=later", Value::Null).0, 422);
    let paused = || call(&server, "GET", "/is_paused", &Value::Null).1;
    assert_eq!(paused(), json!({"is_paused": true}));
    std::thread::scope(|scope| {
        let drawing = scope.spawn(|| post(&server, "/v1/completions", vllm_request("policy")).0);
        server
            .http
            .wait_for_requests(|requests| requests.iter().any(|r| r.path() == "/v1/completions"));
        assert_eq!(paused(), json!({"is_paused": true}));
        assert!(!drawing.is_finished());
        assert_eq!(post(&server, "/resume", Value::Null).0, 200);
        assert_eq!(drawing.join().unwrap(), 200);
    });
    assert_eq!(server.count("/v1/completions"), 1);
}

#[rstest]
#[case("prompt", json!([6]), "Token id 6 is out of vocabulary")]
#[case("max_tokens", json!(22), "maximum context length is 24")]
#[case("n", json!(0), "n must be at least 1")]
#[case("seed", json!(u64::MAX), "seed: 18446744073709551615")]
#[case("min_pp", json!(0), "min_pp: extra inputs")]
fn vllm_refuses_a_request_that_it_cannot_answer(
    #[case] field: &str,
    #[case] value: Value,
    #[case] words: &str,
) {
    let server = fake_vllm::start(served(LogProbs::Raw));
    let mut request = vllm_request("policy");
    request[field] = value;
    let (status, answer) = post(&server, "/v1/completions", request);
    assert_eq!(status, 400);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{message}");
}

#[test]
fn vllm_needs_its_key_and_reports_model_and_version() {
    let server = fake_vllm::start(served(LogProbs::Raw));
    server.engine().api_key = Some("key".to_owned());
    let (status, models) = call(&server, "GET", "/v1/models", &Value::Null);
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("policy")));
    assert_eq!(models["data"][0]["max_model_len"], 24);
    let version = json!({"new_version": "3"});
    assert_eq!(post(&server, "/update_weight_version", version).0, 200);
    let info = call(&server, "GET", "/weight_info", &Value::Null).1;
    assert_eq!(info, json!({"weight_version": "3"}));
    server.engine().api_key = Some("other".to_owned());
    assert_eq!(call(&server, "GET", "/v1/models", &Value::Null).0, 401);
}

#[test]
fn sglang_draws_from_the_weights_that_it_read_last() {
    let server = fake_sglang::start(served(LogProbs::Temperature));
    let draw = |adapter: Option<&str>| {
        let (status, answer) = post(&server, "/generate", sglang_request(adapter));
        assert_eq!(status, 200, "{answer}");
        sglang_answers(&answer)
    };
    let start = draw(None);
    assert!(difference(&start, &parameters(), 0.5) < 1e-5);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let merged = adapter(path);
    let load = json!({"lora_name": "ad", "lora_path": path});
    assert_eq!(
        post(&server, "/generate", sglang_request(Some("ad"))).0,
        400
    );
    assert_eq!(post(&server, "/load_lora_adapter", load.clone()).0, 200);
    assert_eq!(post(&server, "/load_lora_adapter", load).0, 400);
    assert!(difference(&draw(Some("ad")), &merged, 0.5) < 1e-5);
    let unload = json!({"lora_name": "ad"});
    assert_eq!(post(&server, "/unload_lora_adapter", unload).0, 200);

    let none = json!({"model_path": "/none", "weight_version": "2"});
    assert_eq!(post(&server, "/update_weights_from_disk", none).0, 400);
    assert_eq!(draw(None), start);
    let other = other_weights(path);
    let update = json!({"model_path": path, "weight_version": "2"});
    let (status, answer) = post(&server, "/update_weights_from_disk", update);
    assert_eq!((status, &answer["success"]), (200, &json!(true)));
    assert!(difference(&draw(None), &other, 0.5) < 1e-5);
    let info = call(&server, "GET", "/get_model_info", &Value::Null).1;
    assert_eq!(info["weight_version"], "2");
}

#[test]
fn a_fault_replaces_an_answer_or_changes_it() {
    let server = fake_vllm::start(served(LogProbs::Raw));
    let mut number = 0;
    server.set_faults(move |_| {
        number += 1;
        match number {
            1 => Some(Fault::Instead(Reply::new(503, "{}"))),
            2 => Some(Fault::json(|answer| answer["is_paused"] = json!("no"))),
            _ => None,
        }
    });
    let paused = || call(&server, "GET", "/is_paused", &Value::Null);
    assert_eq!(paused(), (503, json!({})));
    assert_eq!(paused(), (200, json!({"is_paused": "no"})));
    assert_eq!(paused(), (200, json!({"is_paused": false})));
}
