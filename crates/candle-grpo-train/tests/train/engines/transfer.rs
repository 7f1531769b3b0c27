//! Whole weights from the policy's memory to the processes of servers.

use std::sync::{Arc, Mutex};
use std::thread;

use candle_core::DType;
use candle_grpo_nn::ComputeDType;
use candle_grpo_test_support::{Reply, Request, message};
use candle_grpo_train::Interrupted;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use rstest::rstest;
use serde_json::json;

use super::fake_server::{FakeServer, Fault};
use super::faults::Cancel;
use super::weight_check::{Checksums, checksums};
use super::workers::missing;
use super::{
    ALL, Policy, Setup, adapters, assert_transferred_in_order, drawn, exhausted, fail_once,
    largest, short, until_it_succeeds,
};

/// Servers with processes, and how the policy's weights are sent to them.
struct Connected {
    setup: Setup,
    message: usize,
    dtype: ComputeDType,
}

impl Connected {
    fn new(sync: WeightSync, servers: usize, processes: usize) -> Self {
        let setup = Setup::new(Engine::Vllm, sync, servers);
        setup.set_processes(processes);
        Self {
            setup,
            message: 1000,
            dtype: ComputeDType::F32,
        }
    }

    fn client(&self, config: &RolloutConfig) -> Arc<ServerGenerator> {
        let client = self.setup.client_without_transport(config, &short());
        let client = client.with_weight_dtype(self.dtype);
        let client = client.with_message_bytes(self.message);
        let network = self.setup.network.clone();
        Arc::new(client.with_transport(Ok(Arc::new(network))).unwrap())
    }

    /// Checks that every process of every server has the bytes of all weights.
    fn assert_received(&self, policy: &Policy) {
        let expected = policy.digests(self.dtype);
        for server in &self.setup.servers {
            let engine = server.engine();
            let workers = engine.workers.as_ref().unwrap();
            let digests = workers.digests();
            assert_eq!(digests.len(), workers.count());
            for received in digests {
                assert_eq!(received, expected);
            }
        }
    }
}

/// With tensor parallelism or data parallelism, and messages of all kinds: one for each weight, one
/// for several, one that the largest weight fills, one for all.
#[rstest]
#[case::one_process(1, 1000)]
#[case::two_processes_tensor_parallel(2, 1000)]
#[case::two_by_two(4, 1000)]
#[case::each_weight_alone(1, 0)]
#[case::as_large_as_the_largest(2, largest())]
#[case::smaller_than_the_largest(2, largest() - 1)]
#[case::all(2, ALL)]
fn every_process_receives_the_bytes_of_all_weights(
    #[case] processes: usize,
    #[case] message: usize,
    #[values(ComputeDType::F32, ComputeDType::Bf16)] dtype: ComputeDType,
) {
    let mut connected = Connected::new(WeightSync::Nccl, 1, processes);
    (connected.message, connected.dtype) = (message, dtype);
    let mut config = connected.setup.config();
    if dtype == ComputeDType::Bf16 {
        config.log_prob_tolerance = 0.1;
    }
    let client = connected.client(&config);
    for version in 1..3 {
        let policy = connected.setup.policy(version);
        policy.push(&client).unwrap();
        connected.assert_received(&policy);
        let sent = connected.setup.network.take_sent();
        let all: usize = policy.parameters.num_elements() * DType::from(dtype).size_in_bytes();
        let sent = if version == 1 { &sent[1..] } else { &sent[..] };
        assert_eq!(sent.iter().sum::<usize>(), all);
        match message {
            0 => assert_eq!(sent.len(), policy.parameters.len()),
            ALL => assert_eq!(sent.len(), 1),
            _ => assert!(sent.len() > 1, "{sent:?}"),
        }
        if dtype == ComputeDType::F32 {
            policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
        }
    }
    assert_eq!(connected.setup.network.groups(), 1);
    // No weights went through files.
    assert!(!connected.setup.folder.path().join("weights").exists());
}

#[test]
fn adapters_are_merged() {
    let connected = Connected::new(WeightSync::Nccl, 2, 2);
    let client = connected.client(&connected.setup.config());
    for version in 1..3 {
        let mut policy = connected.setup.policy(0);
        (policy.version, policy.adapters) = (version, Some(adapters(version)));
        policy.push(&client).unwrap();
        connected.assert_received(&policy);
        policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    }
    // One for each server.
    assert_eq!(connected.setup.network.groups(), 2);
}

#[test]
fn the_requests_are_in_the_order_of_the_protocol() {
    let connected = Connected::new(WeightSync::Nccl, 1, 2);
    let client = connected.client(&connected.setup.config());
    connected.setup.policy(1).push(&client).unwrap();
    let server = &connected.setup.servers[0];
    assert_transferred_in_order(server);
    let requests = server.http.requests();
    let body = |path: &str| -> serde_json::Value {
        let request = requests.iter().find(|request| request.path() == path);
        serde_json::from_slice(&request.unwrap().body).unwrap()
    };
    assert_eq!(
        body("/init_weight_transfer_engine")["init_info"]["world_size"],
        3
    );
    let finished = json!({"weight_version": "policy-000001"});
    assert_eq!(body("/finish_weight_update"), finished);
}

/// The policy would wait forever for processes that do not take part, and the processes for a
/// policy that does not send.
#[rstest]
#[case::join("/init_weight_transfer_engine", || exhausted(500))]
#[case::joined("/init_weight_transfer_engine", || Fault::After(Box::new(|_| Reply::closed())))]
#[case::pause("/pause", || exhausted(500))]
#[case::start("/start_weight_update", || exhausted(500))]
#[case::before_a_message("/update_weights", || exhausted(500))]
#[case::no_answer("/update_weights", || Fault::Instead(Reply::closed()))]
#[case::after_all_messages("/update_weights", || Fault::After(Box::new(|_| Reply::new(500, "{}"))))]
#[case::lost_answer("/update_weights", || Fault::After(Box::new(|_| Reply::closed())))]
#[case::finish("/finish_weight_update", || exhausted(500))]
#[case::cache("/reset_prefix_cache", || exhausted(503))]
#[case::resume("/resume", || exhausted(500))]
#[case::version("/weight_info", || exhausted(500))]
fn a_fault_ends_the_transfer_and_the_server_joins_again(
    #[case] path: &'static str,
    #[case] fault: fn() -> Fault,
    #[values(false, true)] in_the_first: bool,
) {
    let connected = Connected::new(WeightSync::Nccl, 1, 2);
    let client = connected.client(&connected.setup.config());
    let joins = path == "/init_weight_transfer_engine";
    if !in_the_first {
        connected.setup.policy(1).push(&client).unwrap();
        if joins {
            connected.setup.servers[0].restart();
        }
    }
    fail_once(&connected.setup.servers[0], path, 0, fault);
    let policy = connected.setup.policy(2);
    policy.push(&client).unwrap();
    connected.assert_received(&policy);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    assert!(!connected.setup.servers[0].engine().paused);
}

/// Messages that a process does not take: one that has ended, or one that is slow.
#[rstest]
#[case::killed(|server: &FakeServer| server.engine().workers.as_mut().unwrap().kill(0))]
#[case::slow(|server: &FakeServer| server.set_faults(|request| {
    (request.path() == "/update_weights").then(Fault::held)
}))]
#[case::absent(|server: &FakeServer| server.set_faults(|request| {
    let answer = Reply::new(200, "{}");
    (request.path() == "/update_weights").then(|| Fault::Instead(answer))
}))]
fn a_process_that_does_not_receive_is_an_error_within_the_limit(#[case] fault: fn(&FakeServer)) {
    let connected = Connected::new(WeightSync::Nccl, 1, 2);
    let mut config = connected.setup.impatient();
    config.request_timeout = 1.;
    let client = connected.client(&config);
    let server = &connected.setup.servers[0];
    until_it_succeeds(|| connected.setup.policy(1).push(&client));
    fault(server);
    let policy = connected.setup.policy(2);
    let error = policy.push(&client).unwrap_err();
    connected.setup.assert_names_a_server(&error);
    server.set_faults(|_| None);
    server.http.release();
    server.restart();
    until_it_succeeds(|| policy.push(&client));
    connected.assert_received(&policy);
    let rollouts = until_it_succeeds(|| drawn(&client));
    policy.assert_drew(&rollouts, short().temperature);
}

#[test]
fn a_wrong_number_of_processes_is_an_error_within_the_limit() {
    let connected = Connected::new(WeightSync::Nccl, 1, 2);
    connected.setup.servers[0].set_faults(|request| {
        let more = |answer: &mut serde_json::Value| answer["world_size"] = json!(3);
        (request.path() == "/get_world_size").then(|| Fault::json(more))
    });
    let mut config = connected.setup.impatient();
    config.request_timeout = 1.;
    let client = connected.client(&config);
    let error = connected.setup.policy(1).push(&client).unwrap_err();
    connected.setup.assert_names_a_server(&error);
    connected.setup.servers[0].set_faults(|_| None);
    until_it_succeeds(|| connected.setup.policy(1).push(&client));
    connected.assert_received(&connected.setup.policy(1));
}

/// The policy does not train while completions are sampled, so its memory still has the weights.
#[test]
fn a_server_that_restarts_within_a_step_receives_the_weights_again() {
    let connected = Connected::new(WeightSync::Nccl, 1, 2);
    let client = connected.client(&connected.setup.config());
    let policy = connected.setup.policy(3);
    policy.push(&client).unwrap();
    for _ in 0..2 {
        connected.setup.servers[0].restart();
        policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
        connected.assert_received(&policy);
    }
    assert!(connected.setup.network.groups() >= 3);
}

/// The other server samples.
#[test]
fn a_server_that_fails_does_not_hold_up_the_other_one() {
    let connected = Connected::new(WeightSync::Nccl, 2, 1);
    let mut config = connected.setup.config();
    config.request_timeout = 5.;
    let client = connected.client(&config);
    connected.setup.policy(1).push(&client).unwrap();
    connected.setup.servers[1]
        .set_faults(|request| (request.path() == "/update_weights").then(|| exhausted(500)));
    let policy = connected.setup.policy(2);
    policy.push(&client).unwrap();
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
}

#[rstest]
#[case("/init_weight_transfer_engine")]
#[case("/update_weights")]
fn a_cancellation_ends_a_transfer(#[case] path: &'static str) {
    let connected = Connected::new(WeightSync::Nccl, 1, 1);
    let server = &connected.setup.servers[0];
    server.set_faults(move |request| {
        (request.path() == path).then(|| Fault::Instead(Reply::new(200, "{}").held()))
    });
    let client = connected.client(&connected.setup.config());
    let cancel = Cancel::default();
    thread::scope(|scope| {
        let pushing = scope.spawn(|| connected.setup.policy(1).push_with(&client, &cancel));
        let has_come = |requests: &[Request]| requests.iter().any(|of| of.path() == path);
        server.http.wait_for_requests(has_come);
        cancel.cancel();
        let error = pushing.join().unwrap().unwrap_err();
        assert!(error.is::<Interrupted>(), "{error:#}");
    });
}

#[test]
fn auto_uses_processes_that_join() {
    let connected = Connected::new(WeightSync::Auto, 2, 2);
    let client = connected.client(&connected.setup.config());
    let policy = connected.setup.policy(1);
    policy.push(&client).unwrap();
    connected.assert_received(&policy);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    assert_eq!(connected.setup.network.groups(), 2);
    // Adapters alone are smaller.
    let mut policy = connected.setup.policy(1);
    (policy.version, policy.adapters) = (2, Some(adapters(2)));
    policy.push(&client).unwrap();
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    assert_eq!(connected.setup.versions(), ["policy-000002"]);
}

/// One server of two has no processes that join, or the policy none to connect them to.
#[rstest]
#[case::no_transport(true, |_: &FakeServer| {})]
#[case::old(false, |server: &FakeServer| server.engine().workers = None)]
#[case::other_flags(false, |server: &FakeServer| server.set_faults(|request| {
    (request.path() == "/init_weight_transfer_engine").then(|| exhausted(500))
}))]
fn auto_falls_back_to_the_directory(
    #[case] missing_transport: bool,
    #[case] change: fn(&FakeServer),
) {
    let connected = Connected::new(WeightSync::Auto, 2, 2);
    change(&connected.setup.servers[1]);
    let config = connected.setup.config();
    let client = if missing_transport {
        let client = connected.setup.client_without_transport(&config, &short());
        Arc::new(client.with_transport(Err(missing())).unwrap())
    } else {
        connected.client(&config)
    };
    for version in 1..3 {
        let policy = connected.setup.policy(version);
        policy.push(&client).unwrap();
        policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    }
    assert_eq!(connected.setup.versions(), ["policy-000002"]);
    assert!(connected.setup.network.groups() <= 2);
}

#[test]
fn nccl_that_cannot_work_is_refused_with_the_reason() {
    let connected = Connected::new(WeightSync::Nccl, 1, 1);
    let config = connected.setup.impatient();
    let client = connected.setup.client_without_transport(&config, &short());
    let found = message(client.with_transport(Err(missing())));
    let must = "rollout.weight_sync: nccl, must be auto, adapter or disk: the policy is on the CPU";
    assert_eq!(found, must);
    let client = connected.setup.client_without_transport(&config, &short());
    let error = connected.setup.policy(1).push(&client).unwrap_err();
    let must =
        "rollout.weight_sync: nccl, must be auto, adapter or disk: this program sets no transport";
    assert_eq!(error.to_string(), must);
    let server = &connected.setup.servers[0];
    server.engine().workers = None;
    let error = connected.setup.policy(1).push(&connected.client(&config));
    let error = error.unwrap_err();
    connected.setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(
        text.starts_with("rollout.weight_sync: nccl: http"),
        "{text}"
    );
    assert!(text.contains("--weight-transfer-config"), "{text}");
}

/// A weight that did not arrive is found by its checksum.
#[test]
fn checksums_are_compared_with_the_weights_in_memory() {
    let connected = Connected::new(WeightSync::Nccl, 1, 1);
    let reported = Arc::new(Mutex::new(checksums(&connected.setup, 1)));
    let reports = Arc::clone(&reported);
    connected.setup.servers[0].set_faults(move |request| {
        let answer = || json!({"checksums": &*reports.lock().unwrap()}).to_string();
        let is_check = request.path() == "/weight_checker";
        is_check.then(|| Fault::Instead(Reply::new(200, answer())))
    });
    let config = RolloutConfig {
        check_weights: true,
        ..connected.setup.impatient()
    };
    let client = connected.client(&config);
    let push = |version, named: Checksums| {
        *reported.lock().unwrap() = named;
        connected.setup.policy(version).push(&client)
    };
    let [first, second] = [1, 2].map(|version| checksums(&connected.setup, version));
    push(1, first).unwrap();
    push(2, second.clone()).unwrap();
    let error = push(3, second).unwrap_err();
    assert!(
        format!("{error:#}").contains("differ from those"),
        "{error:#}"
    );
}
