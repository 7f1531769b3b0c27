//! Sessions, models and their order.

use std::path::PathBuf;
use std::thread;

use candle_core::{DType, Device};
use candle_grpo_nn::{BaseWeights, DecoderConfig, Parameters};
use candle_grpo_tinker::{TinkerConfig, TinkerServer};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use super::recovery::names;
use super::running::{MODEL, Running, example, numbers, pass, pretrained, step, tokens};

/// The folder of a session's models.
fn models(folder: &TempDir, session: &str) -> PathBuf {
    folder.path().join("sessions").join(session).join("models")
}

fn texts() -> [Vec<u32>; 4] {
    [
        vec![1, 2, 3, 4, 5, 6],
        vec![1, 2, 3, 9, 9],
        vec![7, 7, 7, 7],
        vec![10, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
}

/// Trains a model for three steps and samples from it. Returns all results.
fn train(server: &Running, seed: u64) -> Vec<Value> {
    let session = server.session();
    let model = server.model(&session, 0, seed);
    let mut promises = Vec::new();
    for at in 0..3u64 {
        let texts = texts();
        let data = [
            example(&texts[at as usize]),
            example(&texts[at as usize + 1]),
        ];
        let body = pass(&model, 2 * at + 1, "cross_entropy", &data);
        promises.push(server.post("forward_backward", &body));
        promises.push(server.post("optim_step", &step(&model, 2 * at + 2)));
    }
    let save = json!({"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0});
    let mut results = server.results(&promises);
    let saved = server.call("save_weights_for_sampler", &save);
    let samples = json!({
        "sampling_session_id": saved["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 12, "seed": 5},
        "prompt_logprobs": true,
    });
    results.push(server.call("asample", &samples));
    results
}

#[test]
fn two_sessions_beside_each_other_have_the_bits_of_each_alone() {
    let alone = [1, 2].map(|seed| {
        let folder = tempdir().unwrap();
        train(&Running::start(folder.path()), seed)
    });
    assert_ne!(alone[0], alone[1]);
    let folder = tempdir().unwrap();
    // One of the two is loaded again at every turn.
    let server = Running::with(TinkerConfig {
        micro_batch_tokens: 16,
        max_loaded_models: 1,
        ..TinkerConfig::new(folder.path(), MODEL)
    });
    let together = thread::scope(|scope| {
        let threads = [1, 2].map(|seed| {
            scope.spawn({
                let server = &server;
                move || train(server, seed)
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(together, alone);
}

/// Trains models for two steps of two passes each, and returns all results. With `together`, the
/// passes of all models wait for the engine at the same time.
fn train_models(server: &Running, together: bool) -> Vec<Vec<Value>> {
    let models: Vec<String> = (1..4)
        .map(|seed| server.model(&server.session(), 0, seed))
        .collect();
    let mut results = vec![Vec::new(); models.len()];
    for round in 0..4u64 {
        let seq = 1 + round + round / 2;
        let promise = |at: usize| {
            let texts = texts();
            let first = (at + round as usize) % texts.len();
            // The number of examples differs, and the last model reads one token.
            let data: Vec<Value> = match at {
                2 => vec![example(&texts[first][..2])],
                _ => texts[first..].iter().map(|text| example(text)).collect(),
            };
            let body = pass(&models[at], seq, "cross_entropy", &data);
            server.post("forward_backward", &body)
        };
        if together {
            let occupied = server.occupy();
            let promises: Vec<Value> = (0..models.len()).map(promise).collect();
            server.cancel(&occupied);
            let found = server.results(&promises);
            results
                .iter_mut()
                .zip(found)
                .for_each(|(all, found)| all.push(found));
        } else {
            for (at, all) in results.iter_mut().enumerate() {
                all.push(server.result(&promise(at)));
            }
        }
        if round % 2 == 1 {
            for (model, all) in models.iter().zip(&mut results) {
                all.push(server.call("optim_step", &step(model, seq + 1)));
            }
        }
    }
    results
}

/// Passes that wait together are one, whose results and gradients have the bits of each.
#[rstest]
fn passes_that_join_have_the_bits_of_each_alone(
    #[values(8, 2)] loaded: usize,
    #[values(4096, 20)] tokens: usize,
) {
    let of = |together: bool| {
        let folder = tempdir().unwrap();
        let server = Running::with(TinkerConfig {
            max_loaded_models: loaded,
            micro_batch_tokens: tokens,
            ..TinkerConfig::new(folder.path(), MODEL)
        });
        train_models(&server, together)
    };
    assert_eq!(of(true), of(false));
}

/// The same over a base in quantized blocks, which computes something else than a dense one.
#[test]
fn passes_over_quantized_weights_join() {
    let of = |form: BaseWeights, together: bool| {
        let folder = tempdir().unwrap();
        let config = TinkerConfig::new(folder.path(), MODEL);
        let mut pretrained = pretrained();
        let model = DecoderConfig {
            hidden_size: 32,
            intermediate_size: 64,
            ..pretrained.model
        };
        let parameters = Parameters::init(&model, 5, &Device::Cpu).unwrap();
        pretrained.parameters = parameters.frozen_as(&model, form, DType::F32).unwrap();
        pretrained.model = model;
        train_models(&Running::serve(config, pretrained), together)
    };
    let alone = of(BaseWeights::Q8_0, false);
    assert_eq!(of(BaseWeights::Q8_0, true), alone);
    assert_ne!(of(BaseWeights::Dense, false), alone);
}

/// A pass that fails does not change the results of those that it would join.
#[test]
fn a_pass_that_fails_fails_alone() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let models: Vec<String> = (1..4)
        .map(|seed| server.model(&server.session(), 0, seed))
        .collect();
    let data = [example(&texts()[2])];
    let good = |model: &str, seq| pass(model, seq, "cross_entropy", &data);
    let expected: Vec<Value> = models
        .iter()
        .map(|model| {
            server.call("forward_backward", &good(model, 1));
            server.call("forward", &good(model, 2))
        })
        .collect();
    let mut not_finite = data[0].clone();
    not_finite["loss_fn_inputs"] = json!({
        "target_tokens": tokens(&[7, 7, 7]),
        "logprobs": numbers(&[-1., -1000., -1.]),
        "advantages": numbers(&[1., 1., 1.]),
    });
    let occupied = server.occupy();
    let promises: Vec<Value> = models
        .iter()
        .enumerate()
        .map(|(at, model)| {
            let body = match at {
                1 => pass(model, 3, "importance_sampling", &[not_finite.clone()]),
                _ => good(model, 3),
            };
            server.post("forward_backward", &body)
        })
        .collect();
    server.cancel(&occupied);
    let found = server.results(&promises);
    assert!(
        found[1]["error"].as_str().unwrap().contains("finite"),
        "{:?}",
        found[1]
    );
    for at in [0, 2] {
        assert_eq!(
            found[at]["loss_fn_outputs"],
            expected[at]["loss_fn_outputs"]
        );
    }
    // The gradients of the first passes count, except where a later one failed.
    let steps: Vec<Value> = models
        .iter()
        .map(|model| server.call("optim_step", &step(model, 4)))
        .collect();
    assert!(
        steps[1]["error"].as_str().unwrap().contains("gradient"),
        "{:?}",
        steps[1]
    );
    for (at, seed) in [(0, 1), (2, 3)] {
        let alone = server.model(&server.session(), 0, seed);
        server.call("forward_backward", &good(&alone, 1));
        server.call("forward_backward", &good(&alone, 2));
        assert_eq!(server.call("optim_step", &step(&alone, 3)), steps[at]);
    }
}

#[test]
fn requests_execute_in_the_order_of_their_numbers() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let data = [example(&texts()[0])];
    let last = server.post("forward", &pass(&model, 3, "cross_entropy", &data));
    let second = server.post("optim_step", &step(&model, 2));
    let first = server.post("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    let before = server.result(&first)["metrics"]["loss:sum"]
        .as_f64()
        .unwrap();
    server.result(&second);
    let after = server.result(&last)["metrics"]["loss:sum"]
        .as_f64()
        .unwrap();
    assert!(after < before, "{after} {before}");
}

#[test]
fn a_repeated_request_has_one_result() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let body = pass(&model, 1, "cross_entropy", &[example(&texts()[0])]);
    let promises = [0, 1].map(|_| server.post("forward_backward", &body));
    assert_eq!(promises[0], promises[1]);
    let first = server.result(&promises[0]);
    assert_eq!(server.post("forward_backward", &body), promises[0]);
    assert_eq!(server.result(&promises[0]), first);
    let other = server.try_post("optim_step", &step(&model, 1));
    assert_eq!(other.status, 400);
    let words = "seq_id: 1, must be the number of one request: another one of this model has it";
    assert_eq!(other.detail(), words);
}

#[test]
fn saved_weights_continue_with_their_optimizer() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&texts()[0])];
    let train = |model: &str, seq: u64| {
        server.post(
            "forward_backward",
            &pass(model, seq, "cross_entropy", &data),
        );
        server.call("optim_step", &step(model, seq + 1));
        server.call("forward", &pass(model, seq + 2, "cross_entropy", &data))
    };
    train(&model, 1);
    let save = json!({"model_id": model, "path": "first", "seq_id": 4});
    let path = server.call("save_weights", &save)["path"].clone();
    assert_eq!(path, format!("tinker://{model}/weights/first"));
    let expected = train(&model, 5);
    for (number, optimizer) in [(1, true), (2, false)] {
        let load = json!({
            "session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer,
        });
        assert_eq!(server.call("load_weights", &load)["path"], path);
        let id = format!("{session}:train:{number}");
        let info = server.post("get_info", &json!({"model_id": id}));
        assert_eq!(
            (&info["lora_rank"], &info["model_name"]),
            (&json!(4), &json!(MODEL))
        );
        assert_eq!(train(&id, 1) == expected, optimizer);
    }
    let info = server.post("weights_info", &json!({"tinker_path": path}));
    assert_eq!(
        (&info["base_model"], &info["lora_rank"]),
        (&json!(MODEL), &json!(4))
    );
}

#[test]
fn saved_weights_are_peft_folders() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let save = json!({"model_id": model, "path": "mine", "seq_id": 1});
    server.call("save_weights_for_sampler", &save);
    let saved = models(&folder, &session).join("0/sampler_weights/mine");
    let config = std::fs::read(saved.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(
        (&config["r"], &config["lora_alpha"]),
        (&json!(4), &json!(32))
    );
    assert_eq!(config["base_model_name_or_path"], MODEL);
    assert!(saved.join("adapter_model.safetensors").exists());
}

#[rstest]
#[case(json!({"train_mlp": false}), &["k_proj", "o_proj", "q_proj", "v_proj"])]
#[case(json!({"train_attn": false}), &["down_proj", "gate_proj", "up_proj"])]
fn a_model_trains_the_layers_that_it_was_created_with(
    #[case] options: Value,
    #[case] expected: &[&str],
) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let mut body = json!({
        "session_id": session, "model_seq_id": 0, "base_model": MODEL,
        "lora_config": {"rank": 2},
    });
    for (name, value) in options.as_object().unwrap() {
        body["lora_config"][name] = value.clone();
    }
    let model = server.call("create_model", &body)["model_id"].clone();
    let save = json!({"model_id": model, "path": "a", "seq_id": 1});
    server.call("save_weights", &save);
    let saved = models(&folder, &session).join("0/weights/a/adapter_config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let found = config["target_modules"].as_array().unwrap();
    let mut found: Vec<&str> = found.iter().map(|name| name.as_str().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn a_finished_session_ends() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let heartbeat = json!({"session_id": session});
    assert_eq!(server.try_post("session_heartbeat", &heartbeat).status, 200);
    server.post(
        &format!("sessions/{session}/finish"),
        &json!({"reason": {"type": "success"}}),
    );
    assert_eq!(server.try_post("session_heartbeat", &heartbeat).status, 410);
    let late = server.try_post("optim_step", &step(&model, 1));
    assert_eq!(late.status, 404);
    assert!(
        late.detail()
            .starts_with(&format!("model_id: {model}, must be"))
    );
}

#[test]
fn waiting_requests_have_a_limit() {
    let folder = tempdir().unwrap();
    let server = Running::with(TinkerConfig {
        max_waiting: 2,
        ..TinkerConfig::new(folder.path(), MODEL)
    });
    let model = server.new_model();
    // They wait for the first.
    let promises = [2, 3].map(|seq| server.post("optim_step", &step(&model, seq)));
    let refused = server.try_post("optim_step", &step(&model, 4));
    assert_eq!(refused.status, 429);
    assert!(
        refused.detail().contains("--max-waiting"),
        "{}",
        refused.detail()
    );
    server.post("optim_step", &step(&model, 1));
    server.results(&promises);
    server.call("optim_step", &step(&model, 4));
}

#[rstest]
#[case(json!({"base_model": "other"}), "base_model: other, must be \"tiny\", the model of this server")]
#[case(json!({"lora_config": {"rank": 0}}), "lora_config: rank: 0, must be at least 1")]
#[case(json!({"lora_config": {"rank": 2, "train_mlp": false, "train_attn": false}}), "lora_config: target_modules: [], must name at least one linear map")]
#[case(json!({"optimizer_config": {"type": "dimuon"}}), "optimizer_config.type: dimuon, must be adamw")]
fn models_that_the_server_cannot_create_are_refused(#[case] change: Value, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let mut body = json!({
        "session_id": server.session(), "model_seq_id": 0, "base_model": MODEL,
    });
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    let refused = server.try_post("create_model", &body);
    assert_eq!((refused.status, refused.detail().as_str()), (400, words));
}

/// A wrong request has its turn: its future has the error, and the next request is executed.
#[test]
fn a_wrong_pass_is_a_failed_result() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let good = example(&texts()[0]);
    let with = |key: &str, value: Value| {
        let mut example = good.clone();
        example["loss_fn_inputs"][key] = value;
        example
    };
    let cases = [
        ("dro", good.clone(), "loss_fn: dro, must be cross_entropy"),
        (
            "ppo",
            json!({
                "model_input": good["model_input"],
                "loss_fn_inputs": {"target_tokens": tokens(&[1; 5])},
            }),
            "data[0].advantages: absent, must be given",
        ),
        (
            "cross_entropy",
            with("target_tokens", tokens(&[1])),
            "data[0].target_tokens: 1 values, must have 5",
        ),
        (
            "cross_entropy",
            with("target_tokens", tokens(&[1, 2, 3, 4, 99])),
            "target_tokens[4]: 99, must be below the vocabulary size 12",
        ),
        (
            "cross_entropy",
            with("weights", tokens(&[1, 1])),
            "data[0].weights: 2 values, must have 5",
        ),
        (
            "cross_entropy",
            with(
                "weights",
                json!({"data": [1., 1., 1e39, 1., 1.], "dtype": "float32"}),
            ),
            "data[0].weights[2]: inf, must be finite",
        ),
        (
            "cross_entropy",
            with("mask", numbers(&[1.; 5])),
            "data[0].loss_fn_inputs: mask, must be target_tokens or weights, the inputs of this loss_fn",
        ),
        (
            "importance_sampling",
            with("logprobs", numbers(&[1.; 5])),
            "data[0].loss_fn_inputs: weights, must be target_tokens, logprobs or advantages, the inputs of this loss_fn",
        ),
        (
            "cross_entropy",
            json!({
                "model_input": {"chunks": [{"tokens": [1, 99]}]},
                "loss_fn_inputs": {"target_tokens": tokens(&[1, 2])},
            }),
            "data[0].model_input[1]: 99, must be below the vocabulary size 12",
        ),
        (
            "cross_entropy",
            json!({
                "model_input": {"chunks": [{"tokens": vec![1; 65]}]},
                "loss_fn_inputs": {"target_tokens": tokens(&[1; 65])},
            }),
            "data[0].model_input: 65 tokens, must be at most 64, the positions of the model",
        ),
        (
            "cross_entropy",
            with("target_tokens", json!({"data": [[1]], "dtype": "int64"})),
            "forward_backward_input: ",
        ),
    ];
    for (at, (loss, example, words)) in cases.iter().enumerate() {
        let body = pass(&model, at as u64 + 1, loss, std::slice::from_ref(example));
        let failed = server.call("forward_backward", &body);
        let error = failed["error"]
            .as_str()
            .unwrap_or_else(|| panic!("{failed}"));
        assert!(error.contains(words), "{error:?} {words:?}");
        assert_eq!(failed["category"], "user");
    }
    let seq = 1 + cases.len() as u64;
    let found = server.call(
        "forward_backward",
        &pass(&model, seq, "cross_entropy", &[good]),
    );
    assert!(found["metrics"]["loss:sum"].as_f64().unwrap() > 0.);
}

/// Loaded weights have the rank that the server reports for the model.
#[test]
fn weights_with_other_adapters_are_not_loaded_into_a_model() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&texts()[0])];
    let forward = |seq: u64| server.call("forward", &pass(&model, seq, "cross_entropy", &data));
    let create = json!({
        "session_id": session, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 2},
    });
    let small = server.call("create_model", &create)["model_id"].clone();
    let save = |model: &Value| {
        let save = json!({"model_id": model, "path": "a", "seq_id": 1});
        server.call("save_weights", &save)["path"].clone()
    };
    let (path, own) = (save(&small), save(&json!(model)));
    let load = |seq: u64, path: &Value| {
        let load = json!({"model_id": model, "path": path, "seq_id": seq, "optimizer": true});
        server.call("load_weights", &load)
    };
    let failed = load(2, &path);
    let words = format!(
        "path: {}, must have the adapters of the model (rank 4, train_attn: true, train_mlp: true)",
        path.as_str().unwrap()
    );
    assert_eq!(failed["error"], words, "{failed}");
    let start = forward(3);
    server.post("forward_backward", &pass(&model, 4, "cross_entropy", &data));
    server.call("optim_step", &step(&model, 5));
    assert_ne!(forward(6), start);
    assert_eq!(load(7, &own)["path"], own);
    assert_eq!(forward(8), start);
    let save = json!({"model_id": model, "path": "b", "seq_id": 9});
    let path = server.call("save_weights_for_sampler", &save)["path"].clone();
    let failed = load(10, &path);
    let words = format!(
        "path: {}, must have optimizer state: weights of save_weights",
        path.as_str().unwrap()
    );
    assert_eq!(failed["error"], words, "{failed}");
}

#[test]
fn a_repeated_model_has_the_same_options() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let mut body = json!({
        "session_id": server.session(), "model_seq_id": 0, "base_model": MODEL,
        "lora_config": {"rank": 4},
    });
    let created = server.post("create_model", &body);
    assert_eq!(server.post("create_model", &body), created);
    body["lora_config"]["rank"] = json!(2);
    let refused = server.try_post("create_model", &body);
    let words =
        "model_seq_id: 0, must be the number of one model: another one of this session has it";
    assert_eq!((refused.status, refused.detail().as_str()), (400, words));
}

#[test]
fn saved_weights_are_replaced_only_if_asked() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let mut save = json!({"model_id": model, "path": "a", "seq_id": 1});
    let saved = server.call("save_weights", &save);
    save["seq_id"] = json!(2);
    let failed = server.call("save_weights", &save);
    let words = "path: \"a\", must be a new name, or overwrite must be true";
    assert_eq!(failed["error"], words);
    save["seq_id"] = json!(3);
    save["overwrite"] = json!(true);
    assert_eq!(server.call("save_weights", &save), saved);
}

#[test]
fn a_model_keeps_its_last_unnamed_weights() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    for number in 0..18 {
        let save = json!({
            "model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number,
        });
        let saved = server.call("save_weights_for_sampler", &save);
        assert_eq!(saved["path"], Value::Null);
    }
    let saved = models(&folder, &session).join("0/sampler_weights");
    let expected = |prefix: &str, suffix: &str| {
        let names = (2..18).map(|number| format!("{prefix}{number}{suffix}"));
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    assert_eq!(names(&saved), expected("unnamed-", ""));
    // Their sampling sessions have the same end.
    let samplers = folder
        .path()
        .join("sessions")
        .join(&session)
        .join("samplers");
    assert_eq!(names(&samplers), expected("", ".json"));
    let sample = |server: &Running, number: u64| {
        let body = json!({
            "sampling_session_id": format!("{session}:sample:{number}"), "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1},
        });
        server.try_post("asample", &body).status
    };
    assert_eq!([1, 2].map(|number| sample(&server, number)), [404, 200]);
    drop(server);
    let server = Running::start(folder.path());
    assert_eq!([1, 2].map(|number| sample(&server, number)), [404, 200]);
}

#[test]
fn unnamed_weights_are_not_saved_for_the_number_of_another_sampling_session() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let create = json!({
        "session_id": session, "sampling_session_seq_id": 3, "base_model": MODEL,
    });
    server.post("create_sampling_session", &create);
    let save = json!({"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3});
    let failed = server.call("save_weights_for_sampler", &save);
    let words = "sampling_session_seq_id: 3, must be the number of one sampling session: another one of this session has it";
    assert_eq!(failed["error"], words, "{failed}");
    let saved = models(&folder, &session).join("0/sampler_weights");
    assert!(!saved.exists());
}

#[test]
fn a_server_with_a_key_refuses_requests_without_it() {
    let folder = tempdir().unwrap();
    // Set by nobody.
    let config = TinkerConfig {
        api_key_env: Some("CANDLE_GRPO_NO_SUCH_KEY".to_owned()),
        ..TinkerConfig::new(folder.path(), MODEL)
    };
    let error = TinkerServer::start(config.clone(), pretrained()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "api_key_env: CANDLE_GRPO_NO_SUCH_KEY, must be the name of an environment variable with visible ASCII characters"
    );
    let open = TinkerConfig {
        listen: ([0, 0, 0, 0], 0).into(),
        ..TinkerConfig::new(folder.path(), MODEL)
    };
    let error = open.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("api_key_env: absent, must name a variable"),
        "{error}"
    );
    let is_key = |value: &str| !value.is_empty() && value.bytes().all(|b| b.is_ascii_graphic());
    let (name, key) = std::env::vars().find(|(_, value)| is_key(value)).unwrap();
    let server = Running::with(TinkerConfig {
        api_key_env: Some(name),
        ..config
    });
    let body = br#"{"sdk_version": "0"}"#;
    for (headers, status) in [
        (vec![], 401),
        (vec![("x-api-key", "tml-wrong")], 401),
        (vec![("x-api-key", key.as_str())], 200),
    ] {
        assert_eq!(server.send("create_session", &headers, body).status, status);
    }
}

#[test]
fn one_server_has_a_folder() {
    let folder = tempdir().unwrap();
    let _server = Running::start(folder.path());
    let config = TinkerConfig::new(folder.path(), MODEL);
    let error = TinkerServer::start(config, pretrained()).unwrap_err();
    assert!(
        error.to_string().contains("no other server has open"),
        "{error}"
    );
}
