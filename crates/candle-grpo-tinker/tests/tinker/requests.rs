//! Requests that the client for Python 0.38.0 sent, in the order of their numbers.

use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{self, Running};

/// Session of the recorded requests.
const SESSION: &str = "0123456789abcdef0123456789abcdef";

/// The recorded requests to a model and its samplers.
pub(crate) const RECORDED: [&str; 9] = [
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "ppo_zstd",
    "optim_step",
    "save_weights_for_sampler",
    "asample",
    "save_weights",
    "custom",
];

fn bytes(name: &str) -> &'static [u8] {
    match name {
        "cross_entropy" => include_bytes!("recorded/cross_entropy"),
        "importance_sampling" => include_bytes!("recorded/importance_sampling"),
        "ppo" => include_bytes!("recorded/ppo"),
        "ppo_zstd" => include_bytes!("recorded/ppo_zstd"),
        "optim_step" => include_bytes!("recorded/optim_step"),
        "save_weights_for_sampler" => include_bytes!("recorded/save_weights_for_sampler"),
        "asample" => include_bytes!("recorded/asample"),
        "save_weights" => include_bytes!("recorded/save_weights"),
        "custom" => include_bytes!("recorded/custom"),
        "create_model" => include_bytes!("recorded/create_model"),
        _ => unreachable!("{name}"),
    }
}

/// A call with its headers and body.
type Recorded = (String, Vec<(String, String)>, Vec<u8>);

/// Returns a recorded request for a session of a running server. Its id has the recorded length.
pub(crate) fn recorded(name: &str, model: &str) -> Recorded {
    let session = model.split(':').next().unwrap();
    let is_packed = name == "ppo_zstd";
    let mut body = bytes(name).to_vec();
    if is_packed {
        body = zstd::bulk::decompress(&body, 1 << 16).unwrap();
    }
    let places: Vec<usize> = (0..=body.len() - SESSION.len())
        .filter(|&at| body[at..].starts_with(SESSION.as_bytes()))
        .collect();
    for at in places {
        body[at..at + SESSION.len()].copy_from_slice(session.as_bytes());
    }
    if is_packed {
        body = zstd::bulk::compress(&body, 3).unwrap();
    }
    let call = match name {
        "cross_entropy" | "importance_sampling" | "ppo" | "ppo_zstd" | "custom" => {
            "forward_backward"
        }
        other => other,
    };
    let kind = match call {
        "forward_backward" => "application/x-protobuf",
        _ => "application/json",
    };
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut headers = vec![
        header("content-type", kind),
        header("x-api-key", "tml-local"),
    ];
    if is_packed {
        headers.push(header("content-encoding", "zstd"));
    }
    (call.to_owned(), headers, body)
}

/// Sends a recorded request that the server must accept.
fn send(server: &Running, name: &str, model: &str) -> Value {
    let (call, headers, body) = recorded(name, model);
    let headers: Vec<(&str, &str)> = headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let reply = server.send(&call, &headers, &body);
    assert_eq!(reply.status, 200, "{name}: {}", reply.json());
    reply.json()
}

/// The same requests in JSON, as older clients send them.
fn in_json(model: &str) -> [(&'static str, Value); 3] {
    let tensor = |values: Value, dtype: &str| json!({"data": values, "dtype": dtype, "shape": [4]});
    let input = json!({"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]});
    let policy = json!([{
        "model_input": input,
        "loss_fn_inputs": {
            "target_tokens": tensor(json!([0, 3, 4, 5]), "int64"),
            "logprobs": tensor(json!([0.0, -2.0, -2.5, -2.25]), "float32"),
            "advantages": tensor(json!([0.0, 0.5, 0.5, 0.5]), "float32"),
        },
    }]);
    let text = json!([{
        "model_input": input,
        "loss_fn_inputs": {
            "target_tokens": tensor(json!([2, 3, 4, 5]), "int64"),
            "weights": tensor(json!([0.0, 1.0, 1.0, 0.5]), "float32"),
        },
    }]);
    let ppo = json!({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1});
    [
        (
            "forward_backward",
            json!({
                "model_id": model, "seq_id": 1,
                "forward_backward_input": {"data": text, "loss_fn": "cross_entropy"},
            }),
        ),
        (
            "forward",
            json!({
                "model_id": model, "seq_id": 2,
                "forward_input": {"data": policy, "loss_fn": "importance_sampling", "loss_fn_config": null},
            }),
        ),
        (
            "forward_backward",
            json!({
                "model_id": model, "seq_id": 3,
                "forward_backward_input": {"data": policy, "loss_fn": "ppo", "loss_fn_config": ppo},
            }),
        ),
    ]
}

#[test]
fn requests_of_the_client_mean_the_same_in_either_form() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let json = server.new_model();
    let expected = in_json(&json).map(|(call, body)| server.call(call, &body));
    for third in ["ppo", "ppo_zstd"] {
        let session = server.session();
        let create = String::from_utf8(bytes("create_model").to_vec()).unwrap();
        let create = create.replace(SESSION, &session);
        let created = server.call("create_model", &serde_json::from_str(&create).unwrap());
        let model = created["model_id"].as_str().unwrap();
        let names = ["cross_entropy", "importance_sampling", third];
        let found = names.map(|name| server.result(&send(&server, name, model)));
        assert_eq!(found, expected);
    }
}

#[test]
fn a_loop_of_the_client_runs() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let names = ["cross_entropy", "importance_sampling", "ppo", "optim_step"];
    let results = names.map(|name| server.result(&send(&server, name, &model)));
    assert!(results[3]["metrics"]["grad_norm"].as_f64().unwrap() > 0.);
    let sampler = server.result(&send(&server, "save_weights_for_sampler", &model));
    let session = model.split(':').next().unwrap();
    assert_eq!(
        sampler["sampling_session_id"],
        format!("{session}:sample:0")
    );
    let samples = server.result(&send(&server, "asample", &model));
    assert_eq!(samples["sequences"].as_array().unwrap().len(), 1);
    assert_eq!(samples["prompt_logprobs"].as_array().unwrap().len(), 3);
    let saved = server.result(&send(&server, "save_weights", &model));
    assert_eq!(saved["path"], format!("tinker://{model}/weights/a"));
}

/// The client reads passes and samples as protobuf.
#[test]
fn results_are_protobuf_where_the_client_accepts_it() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let promise = send(&server, "cross_entropy", &model);
    let json = server.result(&promise);
    let id = json!({"request_id": promise["request_id"], "allow_metadata_only": true});
    let headers = [
        ("accept", "application/x-protobuf"),
        ("content-type", "application/json"),
    ];
    let reply = server.send("retrieve_future", &headers, id.to_string().as_bytes());
    let log_probs: Vec<f32> =
        serde_json::from_value(json["loss_fn_outputs"][0]["logprobs"]["data"].clone()).unwrap();
    let bytes: Vec<u8> = log_probs.iter().flat_map(|x| x.to_le_bytes()).collect();
    // BatchedTensor.data: field 1 with 16 bytes.
    let field = [vec![0x0a, 16], bytes].concat();
    assert!(
        reply
            .bytes
            .windows(field.len())
            .any(|window| window == field)
    );
    // The offsets 0 and 16, i64, in field 2.
    let offsets = [vec![0x12, 16], vec![0; 8], vec![16], vec![0; 7]].concat();
    assert!(
        reply
            .bytes
            .windows(offsets.len())
            .any(|window| window == offsets)
    );
}

#[test]
fn samples_are_protobuf_where_the_client_accepts_it() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    // Two tokens without an end.
    let body = json!({
        "base_model": running::MODEL, "prompt_logprobs": true,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, "seed": 1, "stop": []},
    });
    let promise = server.post("asample", &body);
    let json = server.result(&promise);
    let id = json!({"request_id": promise["request_id"]}).to_string();
    let headers = [("accept", "application/x-protobuf")];
    let reply = server.send("retrieve_future", &headers, id.as_bytes());
    let floats = |values: &Value| -> Vec<u8> {
        let values: Vec<Option<f32>> = serde_json::from_value(values.clone()).unwrap();
        let values = values.iter().map(|value| value.unwrap_or(f32::NAN));
        values.flat_map(f32::to_le_bytes).collect()
    };
    let sequence = &json["sequences"][0];
    let tokens: Vec<i32> = serde_json::from_value(sequence["tokens"].clone()).unwrap();
    let tokens: Vec<u8> = tokens.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(sequence["stop_reason"], "length");
    // SampledSequence: the stop reason 1, and 8 bytes each in the fields 2 and 3.
    let sequence = [
        vec![0x08, 1, 0x12, 8],
        tokens,
        vec![0x1a, 8],
        floats(&sequence["logprobs"]),
    ]
    .concat();
    // SampleResponse: the sequence in field 1, and the log-probs of the prompt in field 2.
    let expected = [
        vec![0x0a, sequence.len() as u8],
        sequence,
        vec![0x12, 8],
        floats(&json["prompt_logprobs"]),
    ];
    assert_eq!(reply.bytes, expected.concat());
}
