//! `grpo serve`.

use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use candle_grpo::tinker::{TinkerConfig, TinkerListener};
use candle_grpo_test_support::cases;
use serde_json::{Value, json};

use super::running::Running;
use super::support::{command, grpo, said, write_long_model};

/// A folder with a model.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_long_model(&folder.path().join("model"), "abcdefghijk", 64, 3);
    folder
}

const SERVE: [&str; 6] = ["serve", "--tinker", "model", "--port", "0", "--quiet"];

fn serve(folder: &Path) -> (Running, String) {
    serve_with(folder, &[])
}

pub(crate) fn serve_with(folder: &Path, options: &[&str]) -> (Running, String) {
    let running = Running::start(command(folder, &[&SERVE[..], options].concat()));
    let url = running.lines.find("http://");
    (running, url.trim().to_owned())
}

/// Posts a body; `None` if the server is gone.
pub(crate) fn post(url: &str, call: &str, body: &Value) -> Option<Value> {
    let request = ureq::post(format!("{url}/api/v1/{call}"));
    let request = request.config().http_status_as_error(false).build();
    let response = request.send(body.to_string().as_bytes()).ok()?;
    let status = response.status().as_u16();
    let body = response.into_body().read_to_vec().ok()?;
    let body: Value = serde_json::from_slice(&body).unwrap();
    match status {
        200 => Some(body),
        // The result is not there yet.
        408 => Some(Value::Null),
        status => panic!("{call}: {status} {body}"),
    }
}

/// Waits for a result; `None` if the server is gone.
pub(crate) fn result(url: &str, promise: &Value) -> Option<Value> {
    loop {
        let id = json!({"request_id": promise["request_id"]});
        let result = post(url, "retrieve_future", &id)?;
        if result != Value::Null {
            return Some(result);
        }
    }
}

fn create_model(url: &str) -> String {
    create_model_of(url, 2, 1)
}

pub(crate) fn create_model_of(url: &str, rank: u64, seed: u64) -> String {
    let session = post(url, "create_session", &json!({"sdk_version": "0"})).unwrap();
    let body = json!({
        "session_id": session["session_id"], "model_seq_id": 0, "base_model": "model",
        "lora_config": {"rank": rank, "seed": seed},
    });
    let promise = post(url, "create_model", &body).unwrap();
    let created = result(url, &promise).unwrap();
    created["model_id"].as_str().unwrap().to_owned()
}

/// Requests of a training, the last of which has the loss after it.
fn requests(model: &str) -> Vec<(&'static str, Value)> {
    let pass = |seq: u64| {
        let text: Vec<u64> = (0..20).map(|at| (at * at + seq) % 11 + 1).collect();
        json!({
            "model_id": model, "seq_id": seq,
            "forward_backward_input": {"loss_fn": "cross_entropy", "data": [{
                "model_input": {"chunks": [{"tokens": text[..19]}]},
                "loss_fn_inputs": {"target_tokens": {"data": text[1..], "dtype": "int64"}},
            }]},
        })
    };
    let mut requests: Vec<(&'static str, Value)> = Vec::new();
    for seq in 1..=20 {
        requests.push(if seq % 4 == 0 {
            let step = json!({"learning_rate": 0.01});
            (
                "optim_step",
                json!({"model_id": model, "seq_id": seq, "adam_params": step}),
            )
        } else {
            ("forward_backward", pass(seq))
        });
    }
    requests.push(("forward", pass(21)));
    requests
}

/// Sends all requests, and collects their results until the server is gone. A result that was
/// there before must be the same.
fn work(url: &str, model: &str, results: &mut [Option<Value>]) {
    let mut promises = Vec::new();
    for (call, body) in requests(model) {
        let Some(promise) = post(url, call, &body) else {
            return;
        };
        promises.push(promise);
    }
    for (promise, known) in promises.iter().zip(results) {
        let Some(found) = result(url, promise) else {
            return;
        };
        if let Some(known) = known {
            assert_eq!(found, *known);
        }
        *known = Some(found);
    }
}

#[test]
fn a_server_that_is_killed_at_any_instant_has_the_same_results() {
    let whole = folder();
    let (server, url) = serve(whole.path());
    let model = create_model(&url);
    let mut expected = vec![None; requests(&model).len()];
    let start = Instant::now();
    work(&url, &model, &mut expected);
    let time = start.elapsed().as_secs_f64();
    server.kill();

    let folder = folder();
    let (server, url) = serve(folder.path());
    let model = create_model(&url);
    server.kill();
    let mut results = vec![None; expected.len()];
    for kill in 0..cases(4, 20) {
        let share = (0.3 + f64::from(kill) * 0.618_033_988_749_895).fract();
        let (server, url) = serve(folder.path());
        thread::scope(|scope| {
            let client = scope.spawn(|| work(&url, &model, &mut results));
            server.kill_after(Duration::from_secs_f64(time * share));
            client.join().unwrap();
        });
    }
    let (_server, url) = serve(folder.path());
    work(&url, &model, &mut results);
    assert!(expected.iter().all(Option::is_some));
    assert_eq!(results, expected);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_server() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let folder = folder();
    let (server, url) = serve(folder.path());
    create_model(&url);
    kill(Pid::from_raw(server.id() as i32), Signal::SIGINT).unwrap();
    let (status, errors) = server.end();
    assert_eq!(status.code(), Some(0), "{errors}");
}

#[test]
fn a_base_has_the_form_of_the_option() {
    let folder = folder();
    let output = grpo(
        folder.path(),
        &[&SERVE[..], &["--base-weights", "q9"]].concat(),
    );
    let words = "unknown variant `q9`, expected one of `dense`, `stored`, `q4_0`";
    assert!(said(&output).contains(words), "{}", said(&output));
    let (running, url) = serve_with(folder.path(), &["--base-weights", "stored", "--bf16"]);
    let model = create_model(&url);
    let mut results = vec![None];
    work(&url, &model, &mut results);
    assert!(results[0].is_some());
    drop(running);
}

#[test]
fn wrong_options_are_errors_before_the_model_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let locked = TinkerConfig::new(folder.path().join("locked"), "model");
    let _locked = TinkerListener::bind(locked).unwrap();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = busy.local_addr().unwrap();
    let port = address.port().to_string();
    let busy = format!("listen: {address}, must be a free address");
    for (arguments, words) in [
        (
            ["--host", "0.0.0.0"],
            "api_key_env: absent, must name a variable",
        ),
        (["--max-waiting", "0"], "max_waiting: 0, must be at least 1"),
        (
            ["--api-key-env", "CANDLE_GRPO_NO_SUCH_KEY"],
            "api_key_env: CANDLE_GRPO_NO_SUCH_KEY, must be the name",
        ),
        (
            ["--folder", "locked"],
            "folder: locked, must be one that no other server has open",
        ),
        (["--port", port.as_str()], busy.as_str()),
    ] {
        assert_refused(folder.path(), &arguments, words);
    }
}

fn assert_refused(folder: &Path, arguments: &[&str], words: &str) {
    let output = grpo(folder, &[&SERVE[..3], arguments].concat());
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).contains(words), "{}", said(&output));
}

#[cfg(feature = "engines")]
#[test]
fn engines_without_adapters_are_refused_before_the_model_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let url = ["--engine-base-url", "http://127.0.0.1:1"];
    for (engine, words) in [
        ("openai", "engine: openai, must be vllm or sglang"),
        ("local", "base_url: given, must be absent with engine local"),
    ] {
        let arguments = [&["--engine", engine][..], &url].concat();
        assert_refused(folder.path(), &arguments, words);
    }
    let arguments = ["--engine", "vllm", "--engine-base-url", "127.0.0.1:1"];
    let words = "base_url[0]: \"127.0.0.1:1\", must begin with http:// or https://";
    assert_refused(folder.path(), &arguments, words);
}

/// A request for samples fails with the reason if no server answers. Training goes on.
#[cfg(feature = "engines")]
#[test]
fn samples_of_servers_that_are_gone_fail_alone() {
    use candle_grpo_test_support::{HttpServer, Reply};

    let refusing = HttpServer::start(|_| Reply::new(401, "{}"));
    let folder = folder();
    let engine = ["--engine", "vllm", "--engine-base-url"];
    let (running, url) = serve_with(folder.path(), &[&engine[..], &[&refusing.url()]].concat());
    let sample = json!({
        "base_model": "model", "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1},
    });
    let promise = post(&url, "asample", &sample).unwrap();
    let failed = result(&url, &promise).unwrap();
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("engine.api_key_env: "), "{error}");
    let mut results = vec![None; 3];
    work(&url, &create_model(&url), &mut results);
    assert!(results.iter().all(Option::is_some));
    drop(running);
}
