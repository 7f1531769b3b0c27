//! Samples.

use candle_grpo_tinker::TinkerConfig;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{MODEL, Running, example, pass, step};

/// A request without a sampling session.
fn direct(weights: &Value) -> Value {
    let mut body = json!({
        "num_samples": 1, "prompt_logprobs": true,
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 1},
    });
    match weights {
        Value::Null => body["base_model"] = json!(MODEL),
        path => body["model_path"] = path.clone(),
    }
    body
}

/// A sampling session of the base model.
fn sampler(server: &Running) -> Value {
    let body = json!({
        "session_id": server.session(), "sampling_session_seq_id": 0, "base_model": MODEL,
    });
    server.post("create_sampling_session", &body)["sampling_session_id"].clone()
}

fn request(sampler: &Value, seq: u64, params: Value) -> Value {
    json!({
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": params,
    })
}

#[test]
fn a_seed_draws_the_same_samples_in_any_batch() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    let params = json!({"max_tokens": 20, "seed": 7, "stop": []});
    let alone = server.call("asample", &request(&sampler, 0, params.clone()));
    // These share a batch: they wait for the engine.
    let first = server.occupy();
    let promises: Vec<Value> = (1..6)
        .map(|seq| {
            let mut params = params.clone();
            params["seed"] = json!(if seq == 3 { 7 } else { seq });
            server.post("asample", &request(&sampler, seq, params))
        })
        .collect();
    server.cancel(&first);
    let results = server.results(&promises);
    assert_eq!(results[2], alone);
    assert_ne!(results[0], alone);
    let sequences = alone["sequences"].as_array().unwrap();
    assert_ne!(sequences[0], sequences[1]);
    for sequence in sequences {
        assert_eq!(sequence["stop_reason"], "length");
        assert_eq!(sequence["tokens"].as_array().unwrap().len(), 20);
    }
}

#[test]
fn samples_have_the_log_probs_of_the_training_pass() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4, 5])];
    server.post("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    server.post("optim_step", &step(&model, 2));
    let save = json!({"model_id": model, "path": "a", "seq_id": 3});
    let path = server.call("save_weights_for_sampler", &save)["path"].clone();
    // Without a sampling session, too.
    let body = json!({
        "model_path": path, "num_samples": 1, "prompt_logprobs": true,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 9, "stop": []},
    });
    let drawn = server.call("asample", &body);
    let sequence = &drawn["sequences"][0];
    let tokens: Vec<u32> = serde_json::from_value(sequence["tokens"].clone()).unwrap();
    let text = [vec![1, 2, 3], tokens].concat();
    let forward = pass(&model, 4, "cross_entropy", &[example(&text)]);
    let found = server.call("forward", &forward);
    let log_probs = found["loss_fn_outputs"][0]["logprobs"]["data"]
        .as_array()
        .unwrap();
    assert_eq!(log_probs[2..], sequence["logprobs"].as_array().unwrap()[..]);
    let prompt = drawn["prompt_logprobs"].as_array().unwrap();
    assert_eq!(prompt[0], Value::Null);
    assert_eq!(prompt[1..], log_probs[..2]);
}

#[test]
fn a_sample_ends_at_its_stops() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    let free = json!({"max_tokens": 40, "seed": 7, "stop": []});
    let free = server.call("asample", &request(&sampler, 0, free));
    let tokens: Vec<u32> = serde_json::from_value(free["sequences"][0]["tokens"].clone()).unwrap();
    let letter = |token: u32| char::from(b'a' + token as u8 - 1).to_string();
    let at = tokens.iter().skip(2).position(|&token| token > 0).unwrap() + 2;
    let stops = [
        json!([tokens[at]]),
        json!(letter(tokens[at])),
        json!([letter(tokens[at])]),
    ];
    let first = tokens
        .iter()
        .position(|&token| token == tokens[at] || token == 0)
        .unwrap();
    for (seq, stop) in stops.into_iter().enumerate() {
        let params = json!({"max_tokens": 40, "seed": 7, "stop": stop});
        let found = server.call("asample", &request(&sampler, seq as u64 + 1, params));
        let sequence = &found["sequences"][0];
        assert_eq!(sequence["stop_reason"], "stop", "{found}");
        assert_eq!(sequence["tokens"], json!(tokens[..=first]));
    }
}

#[test]
fn greedy_samples_are_the_most_likely_tokens() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    let of = |seq: u64, params: Value| server.call("asample", &request(&sampler, seq, params));
    let greedy = of(0, json!({"max_tokens": 10, "temperature": 0.0, "stop": []}));
    let top = of(1, json!({"max_tokens": 10, "top_k": 1, "stop": []}));
    assert_eq!(
        greedy["sequences"][0]["tokens"],
        greedy["sequences"][1]["tokens"]
    );
    assert_eq!(
        greedy["sequences"][0]["tokens"],
        top["sequences"][0]["tokens"]
    );
}

/// The client counts on an id for each sample.
#[test]
fn each_sample_has_an_id() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    let body = request(&sampler, 0, json!({"max_tokens": 1}));
    let promise = server.post("asample", &body);
    assert_eq!(promise["sample_sequence_ids"].as_array().unwrap().len(), 2);
    assert_eq!(server.post("asample", &body), promise);
}

/// A client that ends without its results does not take the place of others.
#[test]
fn results_that_nobody_retrieves_are_dropped() {
    let folder = tempdir().unwrap();
    let server = Running::with(TinkerConfig {
        max_waiting: 2,
        ..TinkerConfig::new(folder.path(), MODEL)
    });
    let sampler = sampler(&server);
    let lost: Vec<Value> = (0..6)
        .map(|seq| {
            let promise = server.post("asample", &direct(&Value::Null));
            // This request has its turn after the one before.
            server.call("asample", &request(&sampler, seq, json!({"max_tokens": 1})));
            promise
        })
        .collect();
    assert_eq!(server.try_result(&lost[0]).status, 410);
    for promise in &lost[4..] {
        assert_eq!(server.try_result(promise).status, 200);
    }
}

/// Trains a model for a step, and saves its weights.
fn weights(server: &Running, seed: u64) -> Value {
    let model = server.model(&server.session(), 0, seed);
    let data = [example(&[1, 2, 3, 4])];
    server.post("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    server.post("optim_step", &step(&model, 2));
    let save = json!({"model_id": model, "path": "a", "seq_id": 3});
    server.call("save_weights_for_sampler", &save)["path"].clone()
}

/// Requests that wait together have the samples of each alone: those for several weights are drawn
/// in one batch, and those with another distribution in a batch of their own.
#[rstest]
fn requests_that_share_a_batch_have_the_samples_of_each_alone(#[values(8, 2)] loaded: usize) {
    let folder = tempdir().unwrap();
    let server = Running::with(TinkerConfig {
        max_loaded_models: loaded,
        ..TinkerConfig::new(folder.path(), MODEL)
    });
    let (first, second) = (weights(&server, 1), weights(&server, 2));
    let mut bodies = [
        direct(&Value::Null),
        direct(&first),
        direct(&Value::Null),
        direct(&second),
        direct(&first),
        direct(&first),
    ];
    for (at, body) in bodies.iter_mut().enumerate() {
        body["num_samples"] = json!(1 + at % 3);
        body["sampling_params"] = json!({"max_tokens": 20 + at, "seed": 7});
    }
    bodies[2]["sampling_params"]["temperature"] = json!(0.5);
    bodies[5]["prompt"] = json!({"chunks": [{"tokens": [5]}]});
    let alone: Vec<Value> = bodies
        .iter()
        .map(|body| server.call("asample", body))
        .collect();
    let tokens = |at: usize| &alone[at]["sequences"][0]["logprobs"];
    assert!(tokens(0) != tokens(1) && tokens(0) != tokens(2) && tokens(1) != tokens(3));
    let occupied = server.occupy();
    let promises = bodies.map(|body| server.post("asample", &body));
    server.cancel(&occupied);
    assert_eq!(server.results(&promises), alone);
}

#[test]
fn sampling_sessions_of_several_models_have_the_samples_of_each_alone() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let samplers: Vec<Value> = (0..3)
        .map(|number| {
            let mut body = json!({
                "session_id": server.session(), "sampling_session_seq_id": number,
            });
            match number {
                0 => body["base_model"] = json!(MODEL),
                seed => body["model_path"] = weights(&server, seed),
            }
            server.post("create_sampling_session", &body)["sampling_session_id"].clone()
        })
        .collect();
    let params = json!({"max_tokens": 20, "seed": 7, "stop": []});
    let of = |sampler: &Value, seq: u64| request(sampler, seq, params.clone());
    let alone: Vec<Value> = samplers
        .iter()
        .map(|sampler| server.call("asample", &of(sampler, 0)))
        .collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    let occupied = server.occupy();
    let promises: Vec<Value> = samplers
        .iter()
        .map(|sampler| server.post("asample", &of(sampler, 1)))
        .collect();
    server.cancel(&occupied);
    assert_eq!(server.results(&promises), alone);
}

/// Weights that cannot be read fail their own requests alone.
#[test]
fn a_failure_of_some_weights_is_not_one_of_the_others_in_their_batch() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let (good, lost) = (weights(&server, 1), weights(&server, 2));
    let seeded = |weights: &Value| {
        let mut body = direct(weights);
        body["sampling_params"] = json!({"max_tokens": 9, "seed": 7});
        body
    };
    let alone = server.call("asample", &seeded(&good));
    let lost_folder = lost.as_str().unwrap().strip_prefix("tinker://").unwrap();
    let (session, rest) = lost_folder.split_once(":train:").unwrap();
    let lost_folder = folder
        .path()
        .join("sessions")
        .join(session)
        .join("models")
        .join(rest);
    let occupied = server.occupy();
    let bodies = [seeded(&good), seeded(&lost), seeded(&good)];
    let promises = bodies.map(|body| server.post("asample", &body));
    std::fs::remove_dir_all(lost_folder).unwrap();
    server.cancel(&occupied);
    let found = server.results(&promises);
    assert_eq!((&found[0], &found[2]), (&alone, &alone));
    let error = found[1]["error"].as_str().unwrap();
    let words = format!("path: {}, must be saved weights", lost.as_str().unwrap());
    assert!(error.contains(&words), "{error}");
}

#[test]
fn a_queue_keeps_its_last_retrieved_results() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    let promises: Vec<Value> = (0..65)
        .map(|seq| server.post("asample", &request(&sampler, seq, json!({"max_tokens": 1}))))
        .collect();
    let results = server.results(&promises);
    assert_eq!(server.try_result(&promises[0]).status, 410);
    assert_eq!(server.result(&promises[1]), results[1]);
}

#[test]
fn a_canceled_request_has_no_result() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let promise = server.post("asample", &direct(&Value::Null));
    server.result(&promise);
    server.cancel(&promise);
    assert_eq!(server.try_result(&promise).status, 410);
}

#[test]
fn the_largest_number_is_one() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let sampler = sampler(&server);
    for seq in [u64::MAX, 1] {
        let body = request(&sampler, seq, json!({"max_tokens": 1}));
        let found = server.call("asample", &body);
        assert_eq!(found["sequences"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn requests_without_a_sampling_session_have_numbers_of_their_own() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let mut bodies = [direct(&Value::Null), direct(&Value::Null)];
    bodies[1]["num_samples"] = json!(2);
    let samples = bodies.map(|mut body| {
        body["seq_id"] = json!(0);
        let found = server.call("asample", &body);
        found["sequences"].as_array().unwrap().len()
    });
    assert_eq!(samples, [1, 2]);
}

/// Only requests without one are in their queue.
#[test]
fn the_queue_for_requests_without_a_sampling_session_is_none() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let promise = server.post("asample", &direct(&Value::Null));
    let id = promise["request_id"].as_str().unwrap();
    let queue = id.rsplit_once('#').unwrap().0;
    let body = request(&json!(queue), u64::MAX, json!({"max_tokens": 1}));
    let refused = server.try_post("asample", &body);
    let words = format!("sampling_session_id: {queue}, must be one that this server returned");
    assert_eq!(refused.status, 404);
    assert!(refused.detail().starts_with(&words), "{}", refused.detail());
}

#[test]
fn weights_that_were_saved_again_are_sampled_from() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let data = [example(&[1, 2, 3])];
    let mut last = Value::Null;
    for round in 0..2 {
        let at = 4 * round;
        server.post(
            "forward_backward",
            &pass(&model, at + 1, "cross_entropy", &data),
        );
        server.post("optim_step", &step(&model, at + 2));
        let save = json!({"model_id": model, "path": "latest", "seq_id": at + 3});
        let path = server.call("save_weights_for_sampler", &save)["path"].clone();
        let drawn = server.call("asample", &direct(&path));
        let forward = server.call("forward", &pass(&model, at + 4, "cross_entropy", &data));
        let expected = &forward["loss_fn_outputs"][0]["logprobs"]["data"];
        let found = drawn["prompt_logprobs"].as_array().unwrap();
        assert_eq!(found[1..], expected.as_array().unwrap()[..]);
        assert_ne!(*expected, last);
        last = expected.clone();
    }
}

#[test]
fn the_last_prompt_log_probs_are_those_of_all() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let all = server.call("asample", &direct(&Value::Null));
    let mut body = direct(&Value::Null);
    body["prompt_logprobs_last_n"] = json!(1);
    let last = server.call("asample", &body);
    let (all, last) = (&all["prompt_logprobs"], &last["prompt_logprobs"]);
    assert_eq!(*last, json!([null, null, all[2]]));
    assert!(all[2].is_number());
}

#[test]
fn a_repeated_sampling_session_has_the_same_weights() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let save = json!({"model_id": model, "path": "a", "seq_id": 1});
    let path = server.call("save_weights_for_sampler", &save)["path"].clone();
    let create = json!({
        "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL,
    });
    let created = server.post("create_sampling_session", &create);
    assert_eq!(server.post("create_sampling_session", &create), created);
    let mut other = create.clone();
    other["model_path"] = path;
    let refused = server.try_post("create_sampling_session", &other);
    assert_eq!(refused.status, 400);
    let words = "sampling_session_seq_id: 0, must be the number of one sampling session: another one of this session has it";
    assert_eq!(refused.detail(), words);
}

#[rstest]
#[case(json!({"num_samples": 0}), "num_samples: 0, must be from 1 to 4096")]
#[case(json!({"topk_prompt_logprobs": 2}), "topk_prompt_logprobs: 2, must be 0")]
#[case(json!({"prompt": {"chunks": []}}), "prompt: [], must have at least one token")]
#[case(json!({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}), "prompt.chunks[0].type: image, must be encoded_text")]
#[case(json!({"prompt": {"chunks": [{"tokens": [99]}]}}), "prompt[0]: 99, must be below the vocabulary size 12")]
#[case(json!({"prompt": {"chunks": [{"tokens": [-1]}]}}), "prompt.chunks[0].tokens[0]: -1, must be a token")]
#[case(json!({"sampling_params": {"max_tokens": 62}}), "sampling_params.max_tokens: 62, must be from 1 to 61")]
#[case(json!({"sampling_params": {"temperature": -1.0}}), "sampling_params.temperature: -1.0, must be from 1e-6")]
#[case(json!({"sampling_params": {"top_p": 0.0}}), "sampling_params.top_p: 0, must be")]
#[case(json!({"sampling_params": {"top_k": -2}}), "sampling_params.top_k: -2, must be at least -1")]
#[case(json!({"sampling_params": {"stop": [12]}}), "sampling_params.stop_token_ids[1]: 12, must be below 12")]
#[case(json!({"sampling_session_id": "none:sample:0"}), "sampling_session_id: none:sample:0, must be one that this server returned")]
#[case(json!({"prompt_logprobs_last_n": 1}), "prompt_logprobs_last_n: 1, must be from 1")]
fn wrong_requests_name_the_argument(#[case] change: Value, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let mut body = request(&sampler(&server), 0, json!({"max_tokens": 1}));
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    let refused = server.try_post("asample", &body);
    assert!((400..500).contains(&refused.status), "{refused:?}");
    assert!(
        refused.detail().starts_with(words),
        "{} {words}",
        refused.detail()
    );
}
