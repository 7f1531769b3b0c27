//! Servers that start again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use candle_grpo_tinker::{TinkerConfig, TinkerServer};
use candle_grpo_train::Pretrained;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{MODEL, Running, example, numbers, pass, pretrained, step, tokens};

/// The contents of all files, and the directories, by path.
type Files = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// Reads all files and directories below `folder` into `files`.
fn read(folder: &Path, files: &mut Files) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read(&path, files)?;
            files.insert(path, None);
        } else {
            let bytes = fs::read(&path)?;
            files.insert(path, Some(bytes));
        }
    }
    Ok(())
}

/// Copies a server's folder. The server removes files after it has answered, so they are read until
/// two readings agree.
fn copy(from: &Path, to: &Path) {
    let mut last = Files::new();
    let files = loop {
        let mut files = Files::new();
        let is_whole = read(from, &mut files).is_ok();
        if is_whole && files == last {
            break files;
        }
        last = files;
    };
    for (path, bytes) in files {
        let path = to.join(path.strip_prefix(from).unwrap());
        match bytes {
            None => fs::create_dir_all(path).unwrap(),
            Some(bytes) => {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
        }
    }
}

/// Bodies of a training with a wrong pass in its middle.
fn bodies(model: &str) -> Vec<(&'static str, Value)> {
    let texts = [vec![1, 2, 3, 4], vec![5, 6, 7], vec![8, 9, 10, 11, 1]];
    let mut bodies = Vec::new();
    for at in 0..4u64 {
        let seq = 3 * at + 1;
        for (place, text) in texts.iter().take(2).enumerate() {
            let text = [text.clone(), vec![at as u32]].concat();
            let loss = if at == 1 && place == 1 {
                "wrong"
            } else {
                "cross_entropy"
            };
            let body = pass(model, seq + place as u64, loss, &[example(&text)]);
            bodies.push(("forward_backward", body));
        }
        bodies.push(("optim_step", step(model, seq + 2)));
    }
    let good = |seq| pass(model, seq, "cross_entropy", &[example(&texts[2])]);
    bodies.push(("forward", good(13)));
    // A pass and a step that fail clear the gradients.
    let wrong = pass(model, 15, "importance_sampling", &[not_finite()]);
    let mut wrong_step = step(model, 19);
    wrong_step["adam_params"]["beta1"] = json!(2.);
    bodies.extend([
        ("forward_backward", good(14)),
        ("forward_backward", wrong),
        ("forward_backward", good(16)),
        ("optim_step", step(model, 17)),
        ("forward_backward", good(18)),
        ("optim_step", wrong_step),
        ("optim_step", step(model, 20)),
        ("forward", good(21)),
    ]);
    bodies
}

/// An example for `importance_sampling` whose ratio is too large.
fn not_finite() -> Value {
    let mut example = example(&[1, 2]);
    example["loss_fn_inputs"] = json!({
        "target_tokens": tokens(&[2]), "logprobs": numbers(&[-1000.]), "advantages": numbers(&[1.]),
    });
    example
}

/// The folder after each request is what a server leaves that is killed there. Another server
/// continues with the rest, and has the same results.
#[test]
fn a_server_continues_after_any_request() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let mut copies = Vec::new();
    let mut expected = Vec::new();
    for (call, body) in bodies(&model) {
        expected.push(server.call(call, &body));
        // The client gets an error for these.
        let has_failed = [5, 15, 19, 20]
            .map(|seq| json!(seq))
            .contains(&body["seq_id"]);
        assert_eq!(
            expected[expected.len() - 1]["error"].is_string(),
            has_failed,
            "{body}"
        );
        let copied = tempdir().unwrap();
        copy(folder.path(), copied.path());
        copies.push(copied);
    }
    drop(server);
    for (done, folder) in copies.iter().enumerate() {
        let server = Running::start(folder.path());
        let promises: Vec<Value> = bodies(&model)
            .iter()
            .map(|(call, body)| server.post(call, body))
            .collect();
        let results = server.results(&promises);
        assert_eq!(results, expected, "after request {done}");
    }
}

/// Requests that were promised and not begun are executed by the next server.
#[test]
fn promises_are_kept() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let bodies = bodies(&model);
    let expected: Vec<Value> = bodies
        .iter()
        .map(|(call, body)| server.call(call, body))
        .collect();
    drop(server);

    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let bodies = self::bodies(&model);
    // The first request is missing, so none begins.
    let promises: Vec<Value> = bodies[1..]
        .iter()
        .map(|(call, body)| server.post(call, body))
        .collect();
    drop(server);
    let server = Running::start(folder.path());
    let first = server.post(bodies[0].0, &bodies[0].1);
    let promises = [vec![first], promises].concat();
    let results = server.results(&promises);
    assert_eq!(results, expected);
}

/// A server that is killed between a step's state and its result has the result in the state.
#[test]
fn a_step_is_not_made_twice() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4])];
    server.call("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    let body = step(&model, 2);
    let promise = server.post("optim_step", &body);
    let stepped = server.result(&promise);
    let after = server.call("forward", &pass(&model, 3, "cross_entropy", &data));
    drop(server);
    let models = folder
        .path()
        .join("sessions")
        .join(&session)
        .join("models/0");
    fs::remove_file(models.join("results/2")).unwrap();
    fs::remove_file(models.join("results/3")).unwrap();
    let server = Running::start(folder.path());
    assert_eq!(server.result(&promise), stepped);
    assert_eq!(
        server.call("forward", &pass(&model, 3, "cross_entropy", &data)),
        after
    );
}

#[test]
fn a_folder_with_another_version_is_refused_and_stays() {
    let folder = tempdir().unwrap();
    drop(Running::start(folder.path()));
    let version = folder.path().join("version");
    // The last cannot be read as text.
    for other in [&b"2"[..], &[0xff]] {
        fs::write(&version, other).unwrap();
        let config = TinkerConfig::new(folder.path(), MODEL);
        let error = TinkerServer::start(config, pretrained()).unwrap_err();
        let name = version.display().to_string();
        let words = ["must have the form \"1\"", &name];
        let error = error.to_string();
        assert!(words.iter().any(|words| error.contains(words)), "{error}");
        assert_eq!(fs::read(&version).unwrap(), other);
    }
}

#[test]
fn samples_must_be_sent_again() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let body = json!({
        "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL,
    });
    let sampler = server.post("create_sampling_session", &body)["sampling_session_id"].clone();
    let request = json!({
        "sampling_session_id": sampler, "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 4},
    });
    let promise = server.post("asample", &request);
    let expected = server.result(&promise);
    drop(server);
    let server = Running::start(folder.path());
    let id = json!({"request_id": promise["request_id"]});
    let gone = server.try_post("retrieve_future", &id);
    assert_eq!(gone.status, 410);
    assert!(
        gone.detail().ends_with("send it again"),
        "{}",
        gone.detail()
    );
    // The request has the same seed: that of its id.
    assert_eq!(server.call("asample", &request), expected);
}

/// A client that asks for its samples does not get those of another client.
#[test]
fn samples_without_a_sampling_session_have_other_ids_after_a_restart() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let body = json!({
        "base_model": MODEL, "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 4},
    });
    let first = server.post("asample", &body);
    server.result(&first);
    drop(server);
    let server = Running::start(folder.path());
    server.call("asample", &body);
    assert_eq!(server.try_result(&first).status, 410);
}

/// Returns a base model whose passes fail: their loss is not a number.
fn broken() -> Pretrained {
    let pretrained = pretrained();
    let output = pretrained.parameters.get("lm_head.weight").unwrap();
    let broken = (output.as_detached_tensor() * f64::NAN).unwrap();
    output.set(&broken).unwrap();
    pretrained
}

/// The client got an error for the pass, so its gradient must not count.
#[test]
fn a_pass_that_failed_is_not_repeated() {
    let folder = tempdir().unwrap();
    let config = || TinkerConfig::new(folder.path(), MODEL);
    let server = Running::serve(config(), broken());
    let model = server.new_model();
    let data = [example(&[1, 2, 3, 4])];
    let failed = server.call("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    assert!(failed["error"].is_string(), "{failed}");
    drop(server);
    // It would succeed here.
    let server = Running::serve(config(), pretrained());
    let failed = server.call("optim_step", &step(&model, 2));
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("gradient"), "{error}");
}

/// A server that is killed between a failure and the removal of the requests whose gradients it
/// cleared completes it when it starts.
#[test]
fn a_failure_clears_the_gradients_of_the_next_server() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4])];
    let model_folder = folder
        .path()
        .join("sessions")
        .join(&session)
        .join("models/0");
    let requests = model_folder.join("requests");
    // It waits for the second.
    let wrong = pass(&model, 3, "importance_sampling", &[not_finite()]);
    let wrong = server.post("forward_backward", &wrong);
    server.call("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    let files = ["1", "3"].map(|name| (name, fs::read(requests.join(name)).unwrap()));
    server.call("forward", &pass(&model, 2, "cross_entropy", &data));
    assert!(server.result(&wrong)["error"].is_string());
    drop(server);
    assert!(names(&requests).is_empty());
    for (name, bytes) in files {
        fs::write(requests.join(name), bytes).unwrap();
    }
    let server = Running::start(folder.path());
    assert!(names(&requests).is_empty());
    let failed = server.call("optim_step", &step(&model, 4));
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("gradient"), "{error}");
}

/// The client got the pass's result: a server that cannot repeat it makes no step without its
/// gradient.
#[test]
fn a_pass_that_cannot_be_repeated_ends_the_engine() {
    let folder = tempdir().unwrap();
    let config = || TinkerConfig::new(folder.path(), MODEL);
    let data = [example(&[1, 2, 3, 4])];
    let server = Running::serve(config(), pretrained());
    let models = [0, 1].map(|_| server.new_model());
    for model in &models {
        server.call("forward_backward", &pass(model, 1, "cross_entropy", &data));
    }
    let expected = server.call("optim_step", &step(&models[0], 2));
    drop(server);
    let server = Running::serve(config(), broken());
    let failed = server.try_result(&server.post("optim_step", &step(&models[1], 2)));
    assert_eq!(failed.status, 503, "{failed:?}");
    let words = "repeating the request 1";
    assert!(failed.detail().contains(words), "{}", failed.detail());
    drop(server);
    let server = Running::serve(config(), pretrained());
    let found = server.call("optim_step", &step(&models[1], 2));
    assert_eq!(
        found["metrics"]["learning_rate"],
        expected["metrics"]["learning_rate"]
    );
    assert!(found["metrics"]["grad_norm"].as_f64().unwrap() > 0.);
}

/// Only a pass or a step clears gradients when it fails.
#[test]
fn a_save_that_fails_keeps_the_gradients() {
    let folder = tempdir().unwrap();
    let mut server = Running::start(folder.path());
    let models = [0, 1].map(|_| server.new_model());
    let data = [example(&[1, 2, 3, 4])];
    for (at, model) in models.iter().enumerate() {
        server.call("forward_backward", &pass(model, 1, "cross_entropy", &data));
        let save = |seq: u64| json!({"model_id": model, "path": "a", "seq_id": seq});
        server.call("save_weights", &save(2));
        let failed = server.call("save_weights", &save(3));
        assert!(failed["error"].is_string(), "{failed}");
        if at == 1 {
            drop(server);
            server = Running::start(folder.path());
        }
        let stepped = server.call("optim_step", &step(model, 4));
        assert!(stepped["metrics"]["grad_norm"].as_f64().unwrap() > 0.);
    }
}

/// A request has no result if the state before it cannot be read. The next server executes it.
#[test]
fn a_state_that_cannot_be_read_is_reported() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4])];
    let body = |seq| pass(&model, seq, "cross_entropy", &data);
    server.call("forward_backward", &body(1));
    server.call("optim_step", &step(&model, 2));
    let expected = server.call("forward", &body(3));
    drop(server);
    let sessions = folder.path().join("sessions");
    let optimizer = sessions
        .join(&session)
        .join("models/0/states/3/optimizer.safetensors");
    let bytes = fs::read(&optimizer).unwrap();
    fs::write(&optimizer, b"not an optimizer").unwrap();
    let server = Running::start(folder.path());
    let failed = server.try_result(&server.post("forward", &body(4)));
    assert_eq!(failed.status, 503, "{failed:?}");
    assert!(failed.detail().contains("optimizer"), "{}", failed.detail());
    drop(server);
    fs::write(&optimizer, bytes).unwrap();
    let server = Running::start(folder.path());
    assert_eq!(server.call("forward", &body(4)), expected);
}

/// A model exists if the request that creates it succeeds, and then needs no other files.
#[test]
fn a_model_exists_if_its_creation_succeeds() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4])];
    let forward = |server: &Running, model: &str, seq| {
        server.call("forward", &pass(model, seq, "cross_entropy", &data))
    };
    let expected = forward(&server, &model, 1);
    // These have no optimizer state.
    let save = json!({"model_id": model, "path": "a", "seq_id": 2});
    let path = server.call("save_weights_for_sampler", &save)["path"].clone();
    let created = [false, true].map(|optimizer| {
        let load = json!({
            "session_id": session, "model_seq_id": 1 + u64::from(optimizer), "path": path,
            "optimizer": optimizer,
        });
        server.call("load_weights", &load)
    });
    assert_eq!(created[0]["path"], path);
    assert!(created[1]["error"].is_string(), "{}", created[1]);
    drop(server);
    let saved = folder.path().join("sessions").join(&session);
    fs::remove_dir_all(saved.join("models/0/sampler_weights/a")).unwrap();
    let server = Running::start(folder.path());
    for seq in 1..3 {
        let failed = forward(&server, &format!("{session}:train:2"), seq);
        let words = "the model does not exist: the request that creates it has failed";
        assert_eq!(failed["error"], words, "{failed}");
        assert_eq!(
            forward(&server, &format!("{session}:train:1"), seq),
            expected
        );
    }
}

#[test]
fn unknown_requests_are_refused() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    for (id, status) in [
        ("nothing", 404),
        ("a:train:0#x", 404),
        ("a:sample:0#1", 410),
    ] {
        let refused = server.try_post("retrieve_future", &json!({"request_id": id}));
        assert_eq!(refused.status, status, "{id}");
    }
}

/// A request has no result if the folder cannot be written. The server reports it, and the next
/// one executes the request.
#[test]
fn a_folder_that_cannot_be_written_is_reported() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let sessions = folder.path().join("sessions");
    let results = sessions.join(&session).join("models/0/results");
    let aside = folder.path().join("aside");
    fs::rename(&results, &aside).unwrap();
    fs::write(&results, "not a folder").unwrap();
    let data = [example(&[1, 2, 3, 4])];
    let body = pass(&model, 1, "cross_entropy", &data);
    let promise = server.post("forward", &body);
    let failed = server.try_result(&promise);
    assert_eq!(failed.status, 503, "{failed:?}");
    assert!(failed.detail().contains("results"), "{}", failed.detail());
    let health = ureq::get(format!("{}healthz", server.url));
    let health = health.config().http_status_as_error(false).build().call();
    assert_eq!(health.unwrap().status().as_u16(), 503);
    drop(server);
    fs::remove_file(&results).unwrap();
    fs::rename(&aside, &results).unwrap();
    let server = Running::start(folder.path());
    server.result(&server.post("forward", &body));
}

/// The names in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A server that is killed while it removes a session's files completes it when it starts.
#[test]
fn a_finished_session_keeps_only_its_saved_weights() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let id = server.model(&session, 0, 1);
    let save = json!({"model_id": id, "path": "a", "seq_id": 1});
    server.call("save_weights", &save);
    let data = [example(&[1, 2, 3, 4])];
    server.post("forward_backward", &pass(&id, 2, "cross_entropy", &data));
    server.post("optim_step", &step(&id, 3));
    server.post(&format!("sessions/{session}/finish"), &json!({}));
    // Its turn comes after the removal.
    server.new_model();
    let sessions = folder.path().join("sessions");
    let model = sessions.join(&session).join("models/0");
    let kept = ["model.json", "weights"];
    assert_eq!(names(&model), kept);
    drop(server);
    for part in ["requests/7", "results/7", "states/7", ".states.1.old/7"] {
        fs::create_dir_all(model.join(part)).unwrap();
    }
    drop(Running::start(folder.path()));
    assert_eq!(names(&model), kept);
}

/// A step's state contains what the requests before it did.
#[test]
fn a_step_replaces_the_files_before_it() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let id = server.model(&session, 0, 1);
    let data = [example(&[1, 2, 3, 4])];
    for seq in [1, 3] {
        server.post("forward_backward", &pass(&id, seq, "cross_entropy", &data));
        server.call("optim_step", &step(&id, seq + 1));
    }
    let after = server.call("forward", &pass(&id, 5, "cross_entropy", &data));
    // Its turn comes after all removals.
    server.new_model();
    let sessions = folder.path().join("sessions");
    let model = sessions.join(&session).join("models/0");
    let check = || {
        assert_eq!(names(&model.join("states")), ["5"]);
        assert!(names(&model.join("requests")).is_empty());
    };
    check();
    drop(server);
    // A killed server leaves files that it was about to remove.
    fs::write(model.join("requests/3"), [0; 40]).unwrap();
    fs::create_dir(model.join("states/3")).unwrap();
    let server = Running::start(folder.path());
    check();
    assert_eq!(
        server.call("forward", &pass(&id, 6, "cross_entropy", &data)),
        after
    );
}

/// The last result says where the next server continues, also if it was retrieved first.
#[test]
fn the_last_result_stays() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let body = |seq| pass(&model, seq, "cross_entropy", &[example(&[1, 2])]);
    let promises: Vec<Value> = (1..=66)
        .map(|seq| server.post("forward", &body(seq)))
        .collect();
    server.result(&promises[65]);
    let results = server.results(&promises[..65]);
    assert_eq!(server.try_result(&promises[0]).status, 410);
    drop(server);
    let server = Running::start(folder.path());
    assert_eq!(server.result(&promises[65]), results[64]);
    assert_eq!(server.call("forward", &body(67)), results[64]);
}

/// A server that is killed between saved weights and their result saves them again.
#[test]
fn saved_weights_do_not_refuse_their_own_request() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let model = server.model(&session, 0, 1);
    let save = json!({"model_id": model, "path": "a", "seq_id": 1});
    let saved = server.call("save_weights", &save);
    drop(server);
    let results = folder.path().join("sessions").join(&session);
    fs::remove_file(results.join("models/0/results/1")).unwrap();
    let server = Running::start(folder.path());
    assert_eq!(server.call("save_weights", &save), saved);
}
