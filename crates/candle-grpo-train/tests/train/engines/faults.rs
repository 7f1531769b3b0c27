//! Servers that fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use candle_grpo_test_support::{ClosedPort, Reply, Request};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use candle_grpo_train::{Interrupted, Progress, Rollout, SamplingConfig};
use rstest::rstest;
use serde_json::{Value, json};

use super::fake_server::{FakeServer, Fault};
use super::{Policy, Setup, instead, short, until_it_succeeds};

fn draw(client: &Arc<ServerGenerator>) -> anyhow::Result<Vec<Rollout>> {
    super::draw(client, &short(), 0, Arc::new(NoProgress))
}

/// A client for servers that serve the policy's version 1.
fn ready(setup: &Setup, config: &RolloutConfig) -> (Arc<ServerGenerator>, Policy) {
    let client = Arc::new(setup.client(config, &short()));
    let policy = setup.policy(1);
    policy.push(&client).unwrap();
    (client, policy)
}

/// Makes the next `count` requests to `path` fail.
fn fail(server: &FakeServer, path: &'static str, count: usize, fault: fn() -> Fault) {
    let mut left = count;
    server.set_faults(move |request| {
        let fails = request.path() == path && left > 0;
        left -= usize::from(fails);
        fails.then(fault)
    });
}

fn after(change: fn(Reply) -> Reply) -> Fault {
    Fault::After(Box::new(change))
}

/// Changes vLLM's first choice.
fn choice(change: fn(&mut Value)) -> Fault {
    Fault::json(move |answer| change(&mut answer["choices"][0]))
}

#[rstest]
#[case::internal_error(|| instead(500, r#"{"error": "out of memory"}"#))]
#[case::bad_gateway(|| instead(502, "<html>"))]
#[case::too_many_requests(|| instead(429, ""))]
#[case::no_answer(|| Fault::Instead(Reply::closed()))]
#[case::lost_answer(|| after(|_| Reply::closed()))]
#[case::half_a_body(|| after(Reply::cut))]
#[case::half_a_json(|| instead(200, r#"{"choices": [{"te"#))]
#[case::no_json(|| instead(200, "OK"))]
#[case::nothing(|| instead(200, ""))]
#[case::no_choices(|| instead(200, r#"{"choices": []}"#))]
#[case::an_abort(|| choice(|choice| choice["finish_reason"] = json!("abort")))]
#[case::no_reason(|| choice(|choice| choice["finish_reason"] = Value::Null))]
#[case::no_ids(|| choice(|choice| choice["token_ids"] = Value::Null))]
#[case::no_log_probs(|| choice(|choice| choice["logprobs"] = Value::Null))]
#[case::chunks(|| after(Reply::chunked))]
fn a_request_that_fails_is_repeated(#[case] fault: fn() -> Fault) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let (client, policy) = ready(&setup, &setup.config());
    fail(&setup.servers[0], "/v1/completions", 2, fault);
    let rollouts = draw(&client).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
}

/// A server that never draws anything valid.
#[rstest]
#[case(|| instead(500, r#"{"error": {"message": "out of memory"}}"#), "status 500: out of memory")]
#[case(|| choice(|choice| choice["finish_reason"] = json!("abort")), "aborted")]
#[case(|| choice(|choice| choice["token_ids"] = json!(vec![7; 4])), "7 at 0")]
#[case(|| choice(|choice| choice["token_ids"] = json!([])), "tokens: none")]
#[case(|| choice(|choice| choice["token_ids"] = json!([-1])), "token_ids")]
#[case(|| choice(|choice| choice["token_ids"] = json!(vec![1; 9])), "drawn_log_probs: ")]
#[case(|| choice(|choice| choice["logprobs"]["token_logprobs"] = json!(vec![0.5; 4])), "log_probs: ")]
#[case(|| choice(|choice| choice["logprobs"]["token_logprobs"] = json!([null])), "logprobs")]
#[case(|| instead(400, r#"{"error": {"message": "too long"}}"#), "status 400: too long")]
#[case(|| instead(401, r#"{"error": "Unauthorized"}"#), "status 401: Unauthorized")]
#[case(|| instead(404, r#"{"detail": "Not Found"}"#), "status 404: Not Found")]
#[case(|| instead(307, ""), "status 307")]
#[case(|| instead(200, "<html>"), "/v1/completions: the answer is not JSON, there must be a value at line 1 column 1: \"<html>\"")]
#[case(|| instead(200, r#"{"choices": NaN}"#), "the answer is not JSON")]
#[case(|| instead(200, &" ".repeat(1 << 25)), "larger than request limit")]
fn a_server_that_fails_every_request_is_named(#[case] fault: fn() -> Fault, #[case] words: &str) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let (client, _) = ready(&setup, &setup.impatient());
    fail(&setup.servers[0], "/v1/completions", usize::MAX, fault);
    let error = draw(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains(words), "{text}");
    assert!(text.contains("of prompt "), "{text}");
}

#[rstest]
#[case(400)]
#[case(401)]
#[case(404)]
#[case(422)]
fn a_refused_request_is_not_repeated(#[case] status: u16) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let mut config = setup.config();
    config.max_inflight = 1;
    let (client, _) = ready(&setup, &config);
    let server = &setup.servers[0];
    let before = server.count("/v1/completions");
    server.set_faults(move |_| Some(instead(status, "")));
    setup.assert_names_a_server(&draw(&client).unwrap_err());
    assert_eq!(server.count("/v1/completions"), before + 1);
}

#[test]
fn a_completion_that_a_server_has_no_room_for_is_an_error() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    setup.servers[0].engine().policy.max_model_len = 18;
    let (client, _) = ready(&setup, &setup.config());
    let sampling = SamplingConfig {
        max_new_tokens: 16,
        ..short()
    };
    let error = super::draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("serves up to 18 tokens"), "{text}");
}

#[test]
fn a_model_that_a_server_does_not_serve_is_an_error() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let mut config = setup.impatient();
    config.served_model_name = Some("other".to_owned());
    let error = setup
        .policy(1)
        .push(&setup.client(&config, &short()))
        .unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("must list \"other\""), "{text}");
    config.served_model_name = Some("policy".to_owned());
    ready(&setup, &config);
}

/// The probe after a push reads answers, too.
#[rstest]
#[case(|| instead(500, ""), "status 500")]
#[case(|| choice(|choice| choice["token_ids"] = json!(vec![7; 8])), "7 at 0")]
#[case(|| choice(|choice| choice["token_ids"] = json!([])), "tokens: none")]
#[case(|| choice(|choice| choice["token_ids"] = json!([1])), "log_probs: ")]
fn a_probe_that_fails_names_the_server(#[case] fault: fn() -> Fault, #[case] words: &str) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    fail(&setup.servers[0], "/v1/completions", usize::MAX, fault);
    let client = setup.client(&setup.impatient(), &short());
    let error = setup.policy(1).push(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains(words), "{text}");
}

#[test]
fn an_answer_that_comes_too_late_is_not_delivered() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 2);
    let mut config = setup.config();
    config.request_timeout = 1.;
    // A slow machine may let other requests fail, too.
    config.max_retries = 100;
    let (client, policy) = ready(&setup, &config);
    let mut left = 2;
    setup.servers[0].set_faults(move |request| {
        let holds = request.path() == "/v1/completions" && left > 0;
        left -= usize::from(holds);
        holds.then(Fault::held)
    });
    let rollouts = draw(&client).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
    setup.servers[0].http.wait_until_held(1);
    setup.servers[0].http.release();
    let rollouts = draw(&client).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Sglang, WeightSync::Disk)]
#[case(Engine::Openai, WeightSync::None)]
fn other_servers_take_over_from_one_that_is_gone(#[case] engine: Engine, #[case] sync: WeightSync) {
    let setup = Setup::new(engine, sync, 2);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    let policy = setup.policy(1);
    policy.push(&client).unwrap();
    for gone in [0, 1] {
        setup.servers[gone].http.stop();
        let rollouts = draw(&client).unwrap();
        if engine != Engine::Openai {
            policy.assert_drew(&rollouts, short().temperature);
        }
        setup.servers[gone].http.restart();
    }
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn servers_that_are_gone_for_good_are_an_error(#[case] engine: Engine, #[case] sync: WeightSync) {
    let setup = Setup::new(engine, sync, 2);
    let (client, _) = ready(&setup, &setup.impatient());
    for server in &setup.servers {
        server.http.stop();
    }
    let errors = [
        draw(&client).unwrap_err(),
        setup.policy(2).push(&client).unwrap_err(),
    ];
    for error in errors {
        setup.assert_names_a_server(&error);
    }
    for server in &setup.servers {
        server.http.restart();
    }
    // A caller that repeats the step may find them again.
    let policy = setup.policy(2);
    until_it_succeeds(|| policy.push(&client));
}

/// A server returns, but its answers to the probe never arrive.
#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn a_probe_that_hangs_does_not_hold_up_other_servers(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
) {
    let setup = Setup::new(engine, sync, 2);
    let (client, policy) = ready(&setup, &setup.config());
    let (draws, loads) = (setup.draw_path(), setup.load_path());
    let [hanging, answering] = setup.servers.as_slice() else {
        panic!("two servers");
    };
    hanging.restart();
    let mut loaded = false;
    hanging.set_faults(move |request| {
        loaded |= request.path() == loads;
        (loaded && request.path() == draws).then(Fault::held)
    });
    // The other server answers once the probe hangs.
    answering.set_faults(move |request| (request.path() == draws).then(Fault::held));
    thread::scope(|scope| {
        let drawing = scope.spawn(|| draw(&client).unwrap());
        hanging.http.wait_until_held(1);
        answering.set_faults(|_| None);
        while !drawing.is_finished() {
            answering.http.release();
            thread::yield_now();
        }
        policy.assert_drew(&drawing.join().unwrap(), short().temperature);
    });
}

#[test]
fn a_port_that_refuses_connections_is_named() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 0);
    let port = ClosedPort::new();
    let mut config = setup.impatient();
    config.base_url = vec![port.url()];
    let client = setup.client(&config, &short());
    let text = format!("{:#}", setup.policy(1).push(&client).unwrap_err());
    assert!(text.contains(&port.url()), "{text}");
    assert!(text.to_lowercase().contains("refused"), "{text}");
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter, "/v1/load_lora_adapter")]
#[case(Engine::Vllm, WeightSync::Adapter, "/reset_prefix_cache")]
#[case(Engine::Vllm, WeightSync::Disk, "/pause")]
#[case(Engine::Vllm, WeightSync::Disk, "/collective_rpc")]
#[case(Engine::Vllm, WeightSync::Disk, "/reset_prefix_cache")]
#[case(Engine::Vllm, WeightSync::Disk, "/update_weight_version")]
#[case(Engine::Vllm, WeightSync::Disk, "/resume")]
#[case(Engine::Vllm, WeightSync::Disk, "/weight_info")]
#[case(Engine::Sglang, WeightSync::Adapter, "/load_lora_adapter")]
#[case(Engine::Sglang, WeightSync::Disk, "/update_weights_from_disk")]
#[case(Engine::Sglang, WeightSync::Disk, "/continue_generation")]
fn each_request_of_a_push_may_fail(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
    #[case] path: &'static str,
    #[values(|| instead(500, ""), || after(|_| Reply::closed()))] fault: fn() -> Fault,
) {
    let setup = Setup::new(engine, sync, 1);
    let (client, _) = ready(&setup, &setup.config());
    // The first failures are repeated.
    fail(&setup.servers[0], path, 2, fault);
    let policy = setup.policy(2);
    policy.push(&client).unwrap();
    let rollouts = draw(&client).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
    assert!(!setup.servers[0].engine().paused);
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter, "/v1/load_lora_adapter")]
#[case(Engine::Vllm, WeightSync::Disk, "/collective_rpc")]
#[case(Engine::Vllm, WeightSync::Disk, "/resume")]
#[case(Engine::Sglang, WeightSync::Adapter, "/load_lora_adapter")]
#[case(Engine::Sglang, WeightSync::Disk, "/update_weights_from_disk")]
#[case(Engine::Sglang, WeightSync::Disk, "/continue_generation")]
fn a_push_that_always_fails_names_the_server(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
    #[case] path: &'static str,
) {
    let setup = Setup::new(engine, sync, 1);
    let (client, _) = ready(&setup, &setup.impatient());
    fail(&setup.servers[0], path, usize::MAX, || {
        instead(500, "disk is full")
    });
    let error = setup.policy(2).push(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("status 500: disk is full"), "{text}");
}

/// A reload that fails has destroyed the weights, and the next completion ends the engine.
#[test]
fn an_engine_that_a_reload_has_broken_is_named() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let (client, _) = ready(&setup, &setup.impatient());
    setup.servers[0].engine().broken = true;
    let error = draw(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    setup.servers[0].restart();
    let policy = setup.policy(2);
    until_it_succeeds(|| policy.push(&client));
    policy.assert_drew(&draw(&client).unwrap(), short().temperature);
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn the_key_is_sent_and_a_refused_key_is_an_error(#[case] engine: Engine) {
    let setup = Setup::new(engine, WeightSync::Disk, 1);
    let key = std::env::var("PATH").unwrap();
    setup.servers[0].engine().api_key = Some(key);
    let error = setup
        .policy(1)
        .push(&setup.client(&setup.config(), &short()))
        .unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("api_key_env"), "{text}");
    let mut config = setup.config();
    config.api_key_env = Some("PATH".to_owned());
    let (client, policy) = ready(&setup, &config);
    policy.assert_drew(&draw(&client).unwrap(), short().temperature);
}

/// Cancels once it is set.
#[derive(Default)]
pub(super) struct Cancel(AtomicBool);

impl Cancel {
    pub(super) fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Progress for Cancel {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

fn assert_interrupted(result: anyhow::Result<()>) {
    let error = result.unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
}

/// No time limit ends these waits.
#[rstest]
#[case::a_completion("/v1/completions", Fault::held)]
#[case::a_version("/weight_info", Fault::held)]
#[case::an_ill_server("/v1/completions", || instead(503, ""))]
fn a_cancellation_ends_the_wait_for_completions(
    #[case] path: &'static str,
    #[case] fault: fn() -> Fault,
) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let mut config = setup.config();
    config.max_retries = usize::MAX - 1;
    let (client, _) = ready(&setup, &config);
    let server = &setup.servers[0];
    let before = server.count(path);
    fail(server, path, usize::MAX, fault);
    let cancel = Arc::new(Cancel::default());
    thread::scope(|scope| {
        let drawing = scope.spawn(|| {
            let progress: Arc<dyn Progress> = Arc::clone(&cancel) as _;
            super::draw(&client, &short(), 0, progress).map(drop)
        });
        let tried = |requests: &[Request]| requests.iter().filter(|r| r.path() == path).count();
        server
            .http
            .wait_for_requests(|requests| tried(requests) > before);
        cancel.cancel();
        assert_interrupted(drawing.join().unwrap());
    });
}

#[rstest]
#[case::a_server_that_starts("/health", || instead(503, ""))]
#[case::a_server_that_hangs("/health", Fault::held)]
#[case::a_description("/v1/models", Fault::held)]
#[case::a_transfer("/collective_rpc", Fault::held)]
#[case::a_probe("/v1/completions", Fault::held)]
fn a_cancellation_ends_a_transfer_of_weights(
    #[case] path: &'static str,
    #[case] fault: fn() -> Fault,
) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let server = &setup.servers[0];
    fail(server, path, usize::MAX, fault);
    let cancel = Arc::new(Cancel::default());
    let client = setup.client(&setup.config(), &short());
    thread::scope(|scope| {
        let pushing = scope.spawn(|| setup.policy(1).push_with(&client, &*cancel));
        server
            .http
            .wait_for_requests(|requests| requests.iter().any(|r| r.path() == path));
        cancel.cancel();
        assert_interrupted(pushing.join().unwrap());
    });
}
